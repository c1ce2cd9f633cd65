/* place.c - fuzzes what says where a process stands: the file of the secret, Slurm's node list, the lists of
 * interfaces and ports, the launcher's numbers.  What is refused comes with a sentence that never holds the secret.
 *
 * The first byte says which of them the rest is. */
#include "membership/place.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "fuzz.h"

static void secret_file(const uint8_t *data, size_t size)
{
    struct tly_place p = {0};
    struct tly_params params = {0};
    char path[64], line[600], why[256];
    int fd = memfd_create("secret", MFD_CLOEXEC);
    require(fd >= 0 && fchmod(fd, 0600) == 0 && write(fd, data, size) == (ssize_t)size);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    snprintf(line, sizeof line, "TALLY_SECRET_FILE=%s", path);
    require(tly_params_load(&params, (const char *const[]){line, "TALLY_COORD=127.0.0.1", NULL}, why,
                            sizeof why) == 0);
    if (tly_place_find(&p, &params, true) == 0) {
        require(p.has_secret);
    } else if (size >= 8) {
        char start[9] = {0};
        memcpy(start, data, 8);
        require(strlen(start) < 8 || !strstr(tly_error(), start) || strstr(line, start) ||
                strstr(path, start) ||
                strstr("the job secret has bytes, it needs at least 16 (`tally secret` makes one)", start));
    }
    tly_params_finish(&params);
    close(fd);
}

static void lists(int which, const char *text)
{
    struct sockaddr_storage like = {.ss_family = AF_INET}, out;
    char host[64];
    uint16_t first = 0, last = 0;
    switch (which) {
    case 1:
        if (tly_place_first_host(text, host, sizeof host) == 0)
            require(host[0] && strnlen(host, sizeof host) < sizeof host && !strpbrk(host, "[],"));
        break;
    case 2:
        if (tly_place_iface(text, &like, &out) == 0)
            require(out.ss_family == AF_INET || out.ss_family == AF_INET6);
        break;
    case 3:
        if (tly_place_ports(text, &first, &last) == 0)
            require(first >= 1 && first <= last);
        break;
    default:
        break;
    }
}

static void launcher(const char *text)
{
    static const char *const names[] = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT"};
    char copy[256], *rest = copy;
    struct tly_place p = {0};
    struct tly_params params = {0};
    snprintf(copy, sizeof copy, "%s", text);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *value = strsep(&rest, " ");
        if (value)
            setenv(names[i], value, 1);
    }
    require(tly_params_load(&params, (const char *const[]){"TALLY_COORD=127.0.0.1", NULL}, copy,
                            sizeof copy) == 0);
    if (tly_place_find(&p, &params, true) == 0)
        require(p.rank < p.size && p.size <= TLY_MAX_RANKS);
    tly_params_finish(&params);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        unsetenv(names[i]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char text[1024];
    if (size == 0 || size >= sizeof text)
        return 0;
    memcpy(text, data + 1, size - 1);
    text[size - 1] = '\0';
    if (data[0] % 8 == 0)
        secret_file(data + 1, size - 1);
    else if (data[0] % 8 == 4)
        launcher(text);
    else
        lists(data[0] % 8, text);
    return 0;
}
