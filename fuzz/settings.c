/* settings.c - fuzzes the settings: lines of NAME=value, as an application passes them to tally_comm_open() and,
 * through a configuration file, as a user writes them.  What is refused comes with a sentence, what is taken
 * can be printed and hashed. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/param.h"
#include "fuzz.h"

enum { MOST_LINES = 32 };

static void load(const char *const settings[])
{
    struct tly_params p = {0};
    char why[256] = "", agreed[512];
    int err = tly_params_load(&p, settings, why, sizeof why);
    require(memchr(why, '\0', sizeof why) != NULL);
    if (err) {
        require(err < 0 && why[0] != '\0');
        return;
    }
    require(p.fragment_bytes <= p.part_bytes && p.port >= 1 && p.port <= 65535);
    require(tly_params_agreed_text(&p, agreed, sizeof agreed) > 0);
    (void)tly_params_digest(&p);
    tly_params_finish(&p);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char text[4096], path[64], *lines[MOST_LINES + 1] = {0};
    if (size >= sizeof text)
        return 0;

    int fd = memfd_create("settings", MFD_CLOEXEC);
    require(fd >= 0 && write(fd, data, size) == (ssize_t)size);
    snprintf(path, sizeof path, "TALLY_CONFIG=/proc/self/fd/%d", fd);
    load((const char *const[]){path, NULL});
    close(fd);

    memcpy(text, data, size);
    text[size] = '\0';
    size_t n = 0;
    for (char *rest = text, *line; n < MOST_LINES && (line = strsep(&rest, "\n"));)
        if (strncmp(line, "TALLY_CONFIG", strlen("TALLY_CONFIG")) != 0) /* would open files of the machine */
            lines[n++] = line;
    load((const char *const *)lines);
    return 0;
}
