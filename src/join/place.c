/* place.c - the launcher's variables, the machine's identity, the secret and the coordinator's address. */
#include "join/place.h"

#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <limits.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "transport/tcp/socket.h"

/* --- rank ---------------------------------------------------------------------------------------- */

/* 1: a number was read; 0: the variable is unset; -EINVAL. */
static int read_number(const char *name, long max, long *out)
{
    const char *text = getenv(name);
    if (!text || !*text)
        return 0;
    char *end;
    errno = 0;
    long v = strtol(text, &end, 10);
    if (*end || errno || v < 0 || v > max)
        return tly_fail(EINVAL, "%s=%s is no number from 0 to %ld", name, text, max);
    *out = v;
    return 1;
}

static int find_rank(struct tly_place *p)
{
    static const struct {
        const char *rank, *size, *only_with;
    } launchers[] = {
        {"RANK", "WORLD_SIZE", NULL},
        {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", NULL},
        {"PMI_RANK", "PMI_SIZE", NULL},
        {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID"}, /* a batch shell is one process */
    };
    p->rank = 0;
    p->size = 1;
    for (size_t i = 0; i < sizeof launchers / sizeof *launchers; i++) {
        long rank = 0, size = 0;
        if (launchers[i].only_with && !getenv(launchers[i].only_with))
            continue;
        int has_rank = read_number(launchers[i].rank, TLY_MAX_RANKS - 1, &rank);
        int has_size = read_number(launchers[i].size, TLY_MAX_RANKS, &size);
        if (has_rank < 0 || has_size < 0)
            return -EINVAL;
        if (!has_rank && !has_size)
            continue;
        if (!has_rank || !has_size)
            return tly_fail(EINVAL,
                            "%s is set but %s is not: set both, or start with a launcher such as torchrun",
                            has_rank ? launchers[i].rank : launchers[i].size,
                            has_rank ? launchers[i].size : launchers[i].rank);
        if (size < 1 || rank >= size)
            return tly_fail(EINVAL, "%s=%ld is not below %s=%ld", launchers[i].rank, rank, launchers[i].size,
                            size);
        p->rank = (uint32_t)rank;
        p->size = (uint32_t)size;
        return 0;
    }
    return 0;
}

/* --- machine ------------------------------------------------------------------------------------- */

static void find_machine(struct tly_place *p, const struct tly_params *params)
{
    struct stat st;
    gethostname(p->host, sizeof p->host - 1);
    if (stat("/proc/self/ns/net", &st) == 0)
        p->netns = st.st_ino;
    if (params->host_id) {
        snprintf(p->host_id, sizeof p->host_id, "%s", params->host_id);
        return;
    }
    FILE *f = fopen("/proc/sys/kernel/random/boot_id", "re");
    if (!f || !fgets(p->host_id, sizeof p->host_id, f))
        snprintf(p->host_id, sizeof p->host_id, "%s", p->host);
    if (f)
        fclose(f);
    p->host_id[strcspn(p->host_id, "\n")] = '\0';
}

/* A rank belongs to a job; a tallyd that is told none serves whichever its coordinator runs: "". */
static void find_job(struct tly_place *p, const struct tly_params *params, bool is_rank)
{
    const char *job = params->job;
    if (!job)
        job = getenv("TORCHELASTIC_RUN_ID");
    /* torchrun's word for "no --rdzv-id was given": it tells no job from another. */
    if (!job || !*job || (!params->job && strcmp(job, "none") == 0))
        job = getenv("SLURM_JOB_ID");
    if (!is_rank)
        job = params->job ? params->job : "";
    else if (!job || !*job)
        job = "default";
    snprintf(p->job, sizeof p->job, "%s", job);
}

/* --- secret -------------------------------------------------------------------------------------- */

static int use_secret(struct tly_place *p, const char *text, const char *from)
{
    if (strlen(text) < 16)
        return tly_fail(EINVAL,
                        "%s: the job secret has %zu bytes, it needs at least 16 (`tally secret` makes one)",
                        from, strlen(text));
    tly_hello_secret(text, p->secret);
    p->has_secret = true;
    return 0;
}

static int read_secret_file(struct tly_place *p, const char *path, bool must_exist)
{
    char text[4096];
    struct stat st;
    FILE *f = fopen(path, "re");
    if (!f)
        return must_exist ? tly_fail(EINVAL, "TALLY_SECRET_FILE=%s: %s", path, strerror(errno)) : 0;
    if (fstat(fileno(f), &st) == 0 && (st.st_mode & 077)) {
        fclose(f);
        return tly_fail(EINVAL, "%s is readable by others: chmod 600 %s", path, path);
    }
    size_t n = fread(text, 1, sizeof text - 1, f);
    fclose(f);
    while (n > 0 && (text[n - 1] == '\n' || text[n - 1] == '\r'))
        n--;
    text[n] = '\0';
    int err = use_secret(p, text, path);
    explicit_bzero(text, sizeof text);
    return err;
}

static int find_secret(struct tly_place *p, const struct tly_params *params)
{
    char path[PATH_MAX];
    tly_hello_secret(NULL, p->secret);
    if (params->secret_file)
        return read_secret_file(p, params->secret_file, true);
    if (params->secret)
        return use_secret(p, params->secret, "TALLY_SECRET");
    const char *config = getenv("XDG_CONFIG_HOME"), *home = getenv("HOME");
    if (config && *config)
        snprintf(path, sizeof path, "%s/tally/secret", config);
    else
        snprintf(path, sizeof path, "%s/.config/tally/secret", home ? home : "");
    return read_secret_file(p, path, false);
}

/* --- coordinator --------------------------------------------------------------------------------- */

int tly_place_first_host(const char *list, char *out, size_t len)
{
    size_t n = strcspn(list, "[,");
    if ((n == 0 && *list != '[') || n >= len)
        return -EINVAL;
    if (list[n] != '[') {
        memcpy(out, list, n);
        out[n] = '\0';
        return 0;
    }
    /* prefix[first-last,...]suffix */
    const char *first = list + n + 1, *close = strchr(first, ']');
    size_t digits = strspn(first, "0123456789");
    if (!close || digits == 0 || strcspn(first, "-,]") != digits)
        return -EINVAL;
    size_t suffix = strcspn(close + 1, ",");
    if (n + digits + suffix >= len || memchr(close + 1, '[', suffix))
        return -EINVAL;
    memcpy(out, list, n);
    memcpy(out + n, first, digits);
    memcpy(out + n + digits, close + 1, suffix);
    out[n + digits + suffix] = '\0';
    return 0;
}

/* HOST, HOST:PORT, [V6], [V6]:PORT or a bare V6. */
static int split_address(const char *text, char *host, size_t len, uint16_t *port)
{
    const char *begin = text, *end, *colon = NULL;
    if (*text == '[') {
        begin++;
        end = strchr(begin, ']');
        if (!end || (end[1] && end[1] != ':'))
            return -EINVAL;
        colon = end[1] ? end + 1 : NULL;
    } else {
        colon = strchr(text, ':');
        if (colon && strchr(colon + 1, ':'))
            colon = NULL; /* IPv6 without brackets has no port */
        end = colon ? colon : text + strlen(text);
    }
    if (end == begin || (size_t)(end - begin) >= len)
        return -EINVAL;
    if (colon) {
        char *stop;
        long v = strtol(colon + 1, &stop, 10);
        if (*stop || stop == colon + 1 || v < 1 || v > 65535)
            return -EINVAL;
        *port = (uint16_t)v;
    }
    memcpy(host, begin, (size_t)(end - begin));
    host[end - begin] = '\0';
    return 0;
}

static int find_coordinator(struct tly_place *p, const struct tly_params *params)
{
    const char *master = getenv("MASTER_ADDR"), *nodes = getenv("SLURM_STEP_NODELIST");
    p->coord_port = (uint16_t)params->port;
    if (params->coord) {
        if (split_address(params->coord, p->coord_host, sizeof p->coord_host, &p->coord_port) != 0)
            return tly_fail(EINVAL, "TALLY_COORD=%s is no HOST or HOST:PORT", params->coord);
        return 0;
    }
    if (master && *master) {
        uint16_t ignored;
        if (split_address(master, p->coord_host, sizeof p->coord_host, &ignored) != 0)
            return tly_fail(EINVAL, "MASTER_ADDR=%s is no host", master);
        return 0;
    }
    if (nodes && *nodes && getenv("SLURM_STEP_ID")) {
        if (tly_place_first_host(nodes, p->coord_host, sizeof p->coord_host) != 0)
            return tly_fail(EINVAL, "SLURM_STEP_NODELIST=%s cannot be read: set TALLY_COORD=HOST", nodes);
        return 0;
    }
    if (p->size > 1)
        return tly_fail(EINVAL,
                        "no coordinator: set MASTER_ADDR, or TALLY_COORD=HOST[:PORT], to a host of rank 0 "
                        "that all can reach (mpirun -x MASTER_ADDR=HOST)");
    p->coord_host[0] = '\0';
    return 0;
}

int tly_place_find(struct tly_place *p, const struct tly_params *params, bool is_rank)
{
    memset(p, 0, sizeof *p);
    p->rank = TLY_NO_RANK;
    p->restart = -1;
    int err = is_rank ? find_rank(p) : 0;
    long restart;
    int has = err ? 0 : read_number("TORCHELASTIC_RESTART_COUNT", INT_MAX, &restart);
    if (has < 0)
        return has;
    if (has && is_rank)
        p->restart = (int)restart;
    find_machine(p, params);
    find_job(p, params, is_rank);
    if (!err)
        err = find_secret(p, params);
    if (!err)
        err = find_coordinator(p, params);
    if (!err && !is_rank && !p->coord_host[0])
        err = tly_fail(EINVAL, "no coordinator: give --coord HOST[:PORT] or set TALLY_COORD");
    return err;
}

int tly_place_resolve(const struct tly_place *p, struct sockaddr_storage *out)
{
    if (!p->coord_host[0])
        return tly_address_parse("127.0.0.1", 0, out);
    if (tly_address_parse(p->coord_host, p->coord_port, out) == 0)
        return 0;
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM}, *list, *best = NULL;
    int r = getaddrinfo(p->coord_host, NULL, &hints, &list);
    if (r != 0)
        return tly_fail(r == EAI_AGAIN || r == EAI_NONAME ? EAGAIN : ENOENT,
                        "cannot find the coordinator's host %s: %s", p->coord_host, gai_strerror(r));
    /* All ranks must pick the same one: the first IPv4 address, else the first. */
    for (struct addrinfo *a = list; a && !best; a = a->ai_next)
        if (a->ai_family == AF_INET)
            best = a;
    if (!best)
        best = list;
    memset(out, 0, sizeof *out);
    memcpy(out, best->ai_addr, best->ai_addrlen);
    freeaddrinfo(list);
    tly_address_set_port(out, p->coord_port);
    return 0;
}

/* --- interfaces ---------------------------------------------------------------------------------- */

bool tly_place_is_own(const struct sockaddr_storage *a)
{
    if (tly_address_is_loopback(a))
        return true;
    struct ifaddrs *list;
    bool own = false;
    if (getifaddrs(&list) != 0)
        return false;
    for (struct ifaddrs *i = list; i && !own; i = i->ifa_next) {
        if (!i->ifa_addr || i->ifa_addr->sa_family != a->ss_family)
            continue;
        struct sockaddr_storage b = {0};
        memcpy(&b, i->ifa_addr, tly_address_len(a));
        own = tly_address_same_host(a, &b);
    }
    freeifaddrs(list);
    return own;
}

static const uint8_t *host_bytes(const struct sockaddr_storage *a, int *bits)
{
    *bits = a->ss_family == AF_INET6 ? 128 : 32;
    return a->ss_family == AF_INET6 ? (const uint8_t *)&((const struct sockaddr_in6 *)a)->sin6_addr
                                    : (const uint8_t *)&((const struct sockaddr_in *)a)->sin_addr;
}

static bool in_cidr(const char *cidr, const struct sockaddr_storage *a)
{
    char host[64];
    struct sockaddr_storage net;
    int bits, prefix;
    size_t n = strcspn(cidr, "/");
    if (n >= sizeof host || !cidr[n])
        return false;
    memcpy(host, cidr, n);
    host[n] = '\0';
    if (tly_address_parse(host, 0, &net) != 0 || net.ss_family != a->ss_family)
        return false;
    const uint8_t *x = host_bytes(&net, &bits), *y = host_bytes(a, &bits);
    prefix = atoi(cidr + n + 1);
    if (prefix < 0 || prefix > bits)
        return false;
    for (int i = 0; i < prefix; i++)
        if ((x[i / 8] ^ y[i / 8]) >> (7 - i % 8) & 1)
            return false;
    return true;
}

/* The list says: a first word that includes, or nothing but exclusions, lets in; an exclusion keeps out. */
static bool selected(const char *list, const char *name, const struct sockaddr_storage *a)
{
    char copy[512], *save = NULL;
    bool any_include = false, included = false;
    snprintf(copy, sizeof copy, "%s", list);
    for (char *w = strtok_r(copy, ", ", &save); w; w = strtok_r(NULL, ", ", &save)) {
        bool exclude = *w == '^';
        if (exclude)
            w++;
        bool match = strcmp(w, name) == 0 || in_cidr(w, a);
        if (exclude && match)
            return false;
        if (!exclude) {
            any_include = true;
            included |= match;
        }
    }
    return included || !any_include;
}

int tly_place_iface(const char *iface, const struct sockaddr_storage *like, struct sockaddr_storage *out)
{
    struct ifaddrs *list;
    bool found = false;
    if (getifaddrs(&list) != 0)
        return tly_fail(errno, "cannot list the network interfaces: %s", strerror(errno));
    for (int pass = 0; pass < 2 && !found; pass++)
        for (struct ifaddrs *i = list; i && !found; i = i->ifa_next) {
            if (!i->ifa_addr || (i->ifa_addr->sa_family != AF_INET && i->ifa_addr->sa_family != AF_INET6) ||
                !(i->ifa_flags & IFF_UP) || (pass == 0 && i->ifa_addr->sa_family != like->ss_family))
                continue;
            struct sockaddr_storage a = {0};
            a.ss_family = i->ifa_addr->sa_family;
            memcpy(&a, i->ifa_addr, tly_address_len(&a));
            /* docker0 is no way to another machine unless somebody names it. */
            if (strcmp(i->ifa_name, "docker0") == 0 && !strstr(iface, "docker0"))
                continue;
            if ((i->ifa_flags & IFF_LOOPBACK) && !strstr(iface, i->ifa_name))
                continue;
            if (selected(iface, i->ifa_name, &a)) {
                *out = a;
                found = true;
            }
        }
    freeifaddrs(list);
    return found ? 0 : tly_fail(ENODEV, "TALLY_IFACE=%s: no interface that is up fits", iface);
}

int tly_place_ports(const char *range, uint16_t *first, uint16_t *last)
{
    unsigned a, b;
    int n = 0;
    *first = *last = 0;
    if (!range)
        return 0;
    if (sscanf(range, "%u-%u%n", &a, &b, &n) != 2 || range[n] || a < 1 || b > 65535 || a > b)
        return tly_fail(EINVAL, "TALLY_PORTS=%s is no range A-B within 1-65535", range);
    *first = (uint16_t)a;
    *last = (uint16_t)b;
    return 0;
}
