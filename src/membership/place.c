/* place.c - the launcher's variables, the machine's identity, the secret and the coordinator's address. */
#include "membership/place.h"

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
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/error.h"
#include "transport/address.h"

/* --- rank ---------------------------------------------------------------------------------------- */

/* 1: a number was read; 0: the variable is unset; -EINVAL. */
static int place_read_number(const char *name, long max, long *out)
{
    const char *text = getenv(name);
    if (!text || !*text)
        return 0;
    const char *end = text;
    double v;
    if (!tly_digits(&end, false, &v) || *end || v > (double)max)
        return tly_fail(EINVAL, "%s=%s is no number from 0 to %ld", name, text, max);
    *out = (long)v;
    return 1;
}

/* A process must not train alone whose launcher says which rank it is, but not of how many. */
static int place_refuse_one_of_many(void)
{
    const char *pmix = getenv("PMIX_RANK");
    long proc = 0;
    if (pmix && *pmix)
        return tly_fail(EINVAL,
                        "PMIX_RANK is set, but not how many ranks there are: set RANK and WORLD_SIZE");
    if (place_read_number("SLURM_PROCID", INT_MAX, &proc) < 0)
        return -EINVAL;
    /* 0 without a step is the batch shell, which is one process. */
    return proc > 0
               ? tly_fail(EINVAL,
                          "SLURM_PROCID=%ld, but there is no SLURM_STEP_ID: start ranks with srun, or set "
                          "RANK and WORLD_SIZE",
                          proc)
               : 0;
}

/* What the launcher's count of ranks, or of machines without `local`, says of where the ranks are. */
static int place_find_together(struct tly_place *p, const char *local)
{
    long count = 0;
    int has_count = place_read_number(local ? local : "SLURM_STEP_NUM_NODES", INT_MAX, &count);
    p->together = has_count > 0 && count == (local ? p->size : 1);
    p->apart = has_count > 0 && !p->together;
    return has_count < 0 ? has_count : 0;
}

/* TALLY_RANK: a thread's own, while the environment is the whole process's. */
static int place_use_rank(struct tly_place *p, const struct tly_params *params)
{
    const char *at = params->rank;
    double rank, size;
    if (!tly_digits(&at, false, &rank) || *at++ != '/' || !tly_digits(&at, false, &size) || *at ||
        size > TLY_MAX_RANKS || rank >= size)
        return tly_fail(EINVAL, "TALLY_RANK=%s is no RANK/SIZE", params->rank);
    p->rank = (uint32_t)rank;
    p->size = (uint32_t)size;
    p->in_step = getenv("SLURM_STEP_ID");
    return params->beside ? 0 : place_find_together(p, "LOCAL_WORLD_SIZE");
}

static int place_find_rank(struct tly_place *p, const struct tly_params *params)
{
    static const struct {
        const char *rank, *size, *local_size, *only_with;
        bool step_is_another; /* mpirun starts its daemons in one, on all nodes but its own */
    } launchers[] = {
        {"RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", NULL, false},
        {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", NULL, true},
        {"PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", NULL, false},
        {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", NULL, "SLURM_STEP_ID", false},
    };
    if (params->rank)
        return place_use_rank(p, params);
    p->rank = 0;
    p->size = 1;
    for (size_t i = 0; i < sizeof launchers / sizeof *launchers; i++) {
        long rank = 0, size = 0;
        if (launchers[i].only_with && !getenv(launchers[i].only_with))
            continue;
        int has_rank = place_read_number(launchers[i].rank, TLY_MAX_RANKS - 1, &rank);
        int has_size = place_read_number(launchers[i].size, TLY_MAX_RANKS, &size);
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
        p->in_step = !launchers[i].step_is_another && getenv("SLURM_STEP_ID");
        return place_find_together(p, launchers[i].local_size);
    }
    return place_refuse_one_of_many();
}

/* --- machine ------------------------------------------------------------------------------------- */

/* Copy a name.  One that is too long becomes its beginning and a hash, so that names that differ stay different. */
static void place_copy_name(char *out, size_t len, const char *name)
{
    if (strlen(name) < len)
        snprintf(out, len, "%s", name);
    else
        snprintf(out, len, "%.*s-%016llx", (int)len - 18, name,
                 (unsigned long long)XXH3_64bits(name, strlen(name)));
}

void tly_place_machine(struct tly_place *p, const struct tly_params *params)
{
    struct stat st;
    gethostname(p->host, sizeof p->host - 1);
    if (stat("/proc/self/ns/net", &st) == 0)
        p->netns = st.st_ino;
    if (params->host_id) {
        place_copy_name(p->host_id, sizeof p->host_id, params->host_id);
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
static void place_find_job(struct tly_place *p, const struct tly_params *params, bool is_rank)
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
    place_copy_name(p->job, sizeof p->job, job);
}

/* --- secret -------------------------------------------------------------------------------------- */

static int place_use_secret(struct tly_place *p, const char *text, const char *from)
{
    if (strlen(text) < 16)
        return tly_fail(EINVAL,
                        "%s: the job secret has %zu bytes, it needs at least 16 (`tally secret` makes one)",
                        from, strlen(text));
    tly_hello_secret(text, p->secret);
    p->has_secret = true;
    return 0;
}

static int place_read_secret_file(struct tly_place *p, const char *path, bool must_exist)
{
    char text[4096];
    struct stat st;
    FILE *f = fopen(path, "re");
    if (f)
        setvbuf(f, NULL, _IONBF, 0); /* or the secret would stay in a buffer that is not ours to clear */
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
    int err =
        n == sizeof text - 1 ? tly_fail(EINVAL, "%s: the job secret has more than %zu bytes", path, n - 1)
        : strlen(text) < n   ? tly_fail(EINVAL, "%s: the job secret holds a zero byte", path)
                             : place_use_secret(p, text, path);
    explicit_bzero(text, sizeof text);
    return err;
}

static int place_find_secret(struct tly_place *p, const struct tly_params *params)
{
    char path[PATH_MAX];
    tly_hello_secret(NULL, p->secret);
    if (params->secret_file)
        return place_read_secret_file(p, params->secret_file, true);
    if (params->secret)
        return place_use_secret(p, params->secret, "TALLY_SECRET");
    const char *config = getenv("XDG_CONFIG_HOME"), *home = getenv("HOME");
    if (config && *config)
        snprintf(path, sizeof path, "%s/tally/secret", config);
    else
        snprintf(path, sizeof path, "%s/.config/tally/secret", home ? home : "");
    return place_read_secret_file(p, path, false);
}

/* --- coordinator --------------------------------------------------------------------------------- */

int tly_place_first_host(const char *list, char *out, size_t len)
{
    /* Each bracket, as in "rack[1-2]n[01-16],…", stands for its first number as it is written. */
    char host[256];
    size_t n = 0;
    while (*list && *list != ',') {
        const char *from = list++;
        size_t digits = 1;
        if (*from == '[') {
            size_t inside = strspn(++from, "0123456789-,");
            digits = strspn(from, "0123456789");
            if (digits == 0 || from[inside] != ']')
                return -EINVAL;
            list = from + inside + 1;
        } else if (*from == ']') {
            return -EINVAL;
        }
        if (n + digits >= sizeof host)
            return -EINVAL;
        memcpy(host + n, from, digits);
        n += digits;
    }
    if (n == 0 || n >= len)
        return -EINVAL;
    memcpy(out, host, n);
    out[n] = '\0';
    return 0;
}

static int place_find_coordinator(struct tly_place *p, const struct tly_params *params)
{
    const char *master = getenv("MASTER_ADDR"), *nodes = getenv("SLURM_STEP_NODELIST");
    p->coord_port = (uint16_t)params->port;
    snprintf(p->coord_from, sizeof p->coord_from, "%s",
             params->coord_from ? params->coord_from : "TALLY_COORD");
    if (params->coord) {
        if (tly_address_split(params->coord, p->coord_host, sizeof p->coord_host, &p->coord_port) != 0)
            return tly_fail(EINVAL,
                            "%s%s%s is no HOST or HOST:PORT; IPv6 is written [ADDRESS] or [ADDRESS]:PORT",
                            p->coord_from, params->coord_from ? ": " : "=", params->coord);
        p->coord_given = !params->coord_from;
        return 0;
    }
    if (master && *master) {
        uint16_t ignored;
        snprintf(p->coord_from, sizeof p->coord_from, "MASTER_ADDR");
        if (tly_address_split(master, p->coord_host, sizeof p->coord_host, &ignored) != 0)
            return tly_fail(EINVAL, "MASTER_ADDR=%s is no host", master);
        return 0;
    }
    if (p->in_step && nodes && *nodes) {
        snprintf(p->coord_from, sizeof p->coord_from, "SLURM_STEP_NODELIST");
        if (tly_place_first_host(nodes, p->coord_host, sizeof p->coord_host) != 0)
            return tly_fail(EINVAL, "SLURM_STEP_NODELIST=%s cannot be read: set TALLY_COORD=HOST", nodes);
        return 0;
    }
    if (p->size > 1 && p->together) {
        snprintf(p->coord_host, sizeof p->coord_host, "127.0.0.1");
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
    int err = is_rank ? place_find_rank(p, params) : 0;
    long restart = -1;
    int has = err || params->beside ? 0 : place_read_number("TORCHELASTIC_RESTART_COUNT", INT_MAX, &restart);
    if (has < 0)
        return has;
    if (has && is_rank)
        p->restart = (int)restart;
    tly_place_machine(p, params);
    place_find_job(p, params, is_rank);
    if (!err)
        err = place_find_secret(p, params);
    if (!err)
        err = place_find_coordinator(p, params);
    if (!err && !is_rank && !p->coord_host[0])
        err = tly_fail(EINVAL, "no coordinator: give --coord HOST[:PORT] or set TALLY_COORD");
    return err;
}

static bool place_is_localhost(const char *name)
{
    size_t n = strlen(name), tail = strlen(".localhost");
    return strcasecmp(name, "localhost") == 0 || strcasecmp(name, "localhost.localdomain") == 0 ||
           (n > tail && strcasecmp(name + n - tail, ".localhost") == 0);
}

bool tly_place_is_loopback(const struct tly_place *p)
{
    struct sockaddr_storage a;
    return place_is_localhost(p->coord_host) ||
           (tly_address_parse(p->coord_host, 0, &a) == 0 && tly_address_is_loopback(&a));
}

/* Those of `list` with this family that are of use.  0.0.0.0 means this machine.  Without a secret only this machine's
 * processes get in, so loopback stands for each of its addresses, unless the launcher speaks of several machines. */
static void place_collect(const struct tly_place *p, const struct addrinfo *list, int family,
                          struct tly_addresses *out)
{
    for (const struct addrinfo *i = list; i && out->count < TLY_MOST_ADDRESSES; i = i->ai_next) {
        struct sockaddr_storage *a = &out->at[out->count];
        bool known = false;
        if (i->ai_family != family)
            continue;
        memset(a, 0, sizeof *a);
        memcpy(a, i->ai_addr, i->ai_addrlen);
        bool any = tly_address_is_any(a);
        out->named |= any;
        if (p->has_secret ? any : !p->apart && !tly_address_is_loopback(a) && (any || tly_place_is_own(a)))
            tly_address_parse(family == AF_INET6 ? "::1" : "127.0.0.1", 0, a);
        for (int j = 0; j < out->count; j++)
            known |= tly_address_same_host(a, &out->at[j]);
        if (!known && !tly_address_is_link_local(a) && (p->has_secret || tly_address_is_loopback(a)))
            out->count++;
    }
}

int tly_place_resolve(const struct tly_place *p, struct tly_addresses *out)
{
    struct tly_addresses found = {0};
    struct sockaddr_storage numeric;
    const char *host = p->coord_host[0] ? p->coord_host : "127.0.0.1";
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM}, *list;
    int r = getaddrinfo(host, NULL, &hints, &list);
    if (r != 0)
        return tly_fail(EAGAIN, "cannot find the coordinator's host %s (%s): %s", host, p->coord_from,
                        r == EAI_SYSTEM ? strerror(errno) : gai_strerror(r));
    found.named = tly_address_parse(host, 0, &numeric) != 0 && !place_is_localhost(host);
    place_collect(p, list, AF_INET, &found);
    place_collect(p, list, AF_INET6, &found);
    struct sockaddr_storage first = {0};
    memcpy(&first, list->ai_addr, list->ai_addrlen);
    freeaddrinfo(list);
    if (!found.count && !p->has_secret && p->together && !p->coord_given) {
        /* What the launcher calls this machine's name or address is of no use to anybody outside. */
        tly_address_parse("127.0.0.1", 0, &found.at[0]);
        found.count = 1;
        found.named = false;
    }
    if (!found.count && tly_address_is_link_local(&first))
        return tly_fail(EINVAL,
                        "the coordinator's address %s (%s) is link-local and means something else on every "
                        "machine: name a global or unique local one",
                        host, p->coord_from);
    if (!found.count)
        return tly_fail(
            EACCES,
            "a job over several machines needs a secret, the same on all (%s is %s): run `tally "
            "secret ~/.config/tally/secret` and copy that file to each, or set TALLY_SECRET_FILE or "
            "TALLY_SECRET",
            p->coord_from, host);
    for (int i = 0; i < found.count; i++)
        tly_address_set_port(&found.at[i], p->coord_port);
    *out = found;
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

bool tly_place_take_own(const struct tly_place *p, struct tly_addresses *to, struct sockaddr_storage *listen)
{
    int i = 0;
    while (i < to->count && !tly_place_is_own(&to->at[i]))
        i++;
    if (i == to->count)
        return false;
    to->at[0] = to->at[i];
    to->count = 1;
    to->settled = true;
    *listen = to->at[0];
    /* Behind a name others may see other addresses than this machine does: 127.0.1.1 here, one of each card there.
     * Only a secret lets them in. */
    if (to->named && p->has_secret) {
        tly_address_any(listen);
        tly_address_set_port(listen, tly_address_port(&to->at[0]));
    }
    return true;
}

static const uint8_t *place_host_bytes(const struct sockaddr_storage *a, int *bits)
{
    *bits = a->ss_family == AF_INET6 ? 128 : 32;
    return a->ss_family == AF_INET6 ? (const uint8_t *)&((const struct sockaddr_in6 *)a)->sin6_addr
                                    : (const uint8_t *)&((const struct sockaddr_in *)a)->sin_addr;
}

/* 1: `a` is in the network of `cidr`, such as 10.1.0.0/16; 0: it is not; -EINVAL: that is no network. */
static int place_in_cidr(const char *cidr, const struct sockaddr_storage *a)
{
    char host[64];
    struct sockaddr_storage net;
    int bits;
    size_t n = strcspn(cidr, "/");
    const char *end = cidr + n + (cidr[n] == '/');
    double prefix;
    if (n >= sizeof host || !tly_digits(&end, false, &prefix) || *end)
        return -EINVAL;
    memcpy(host, cidr, n);
    host[n] = '\0';
    if (tly_address_parse(host, 0, &net) != 0)
        return -EINVAL;
    const uint8_t *x = place_host_bytes(&net, &bits), *y;
    if (prefix > bits)
        return -EINVAL;
    if (net.ss_family != a->ss_family)
        return 0;
    y = place_host_bytes(a, &bits);
    for (int i = 0; i < prefix; i++)
        if ((x[i / 8] ^ y[i / 8]) >> (7 - i % 8) & 1)
            return 0;
    return 1;
}

/* What the list says of an interface's address: an exclusion keeps out; a word that includes, or nothing but
 * exclusions, lets in. */
enum choice { OUT, NOT_EXCLUDED, IN_NETWORK, NAMED };

static int place_choose(const char *list, const char *name, const struct sockaddr_storage *a,
                        enum choice *out)
{
    enum choice best = OUT;
    bool excluded = false, any_include = false;
    for (const char *from = list; *from; from += strspn(from, ", ")) {
        char word[80];
        size_t n = strcspn(from, ", ");
        bool exclude = *from == '^';
        if (n - exclude < 1 || n >= sizeof word)
            return tly_fail(EINVAL, "TALLY_IFACE=%s: no list of interfaces and networks, separated by commas",
                            list);
        memcpy(word, from + exclude, n - exclude);
        word[n - exclude] = '\0';
        from += n;
        int net = strchr(word, '/') ? place_in_cidr(word, a) : 0;
        if (net < 0)
            return tly_fail(EINVAL, "TALLY_IFACE=%s: %s is no network such as 10.1.0.0/16", list, word);
        enum choice c = strcmp(word, name) == 0 ? NAMED : net ? IN_NETWORK : OUT;
        any_include |= !exclude;
        excluded |= exclude && c != OUT;
        if (!exclude && c > best)
            best = c;
    }
    *out = excluded ? OUT : any_include ? best : NOT_EXCLUDED;
    return 0;
}

/* How well an address fits; 0: not at all. */
static int place_fitness(const struct ifaddrs *i, const char *iface, const struct sockaddr_storage *like,
                         struct sockaddr_storage *a)
{
    enum choice c = OUT;
    if (!i->ifa_addr || (i->ifa_addr->sa_family != AF_INET && i->ifa_addr->sa_family != AF_INET6) ||
        !(i->ifa_flags & IFF_UP))
        return 0;
    memset(a, 0, sizeof *a);
    a->ss_family = i->ifa_addr->sa_family;
    memcpy(a, i->ifa_addr, tly_address_len(a));
    int err = place_choose(iface, i->ifa_name, a, &c);
    if (err)
        return err;
    /* These are no way to another machine unless somebody names them. */
    bool inward = (i->ifa_flags & IFF_LOOPBACK) || strcmp(i->ifa_name, "docker0") == 0;
    if (c == OUT || (inward && c != NAMED) || tly_address_is_link_local(a))
        return 0;
    return tly_address_same_host(a, like) ? 3 : a->ss_family == like->ss_family ? 2 : 1;
}

int tly_place_iface(const char *iface, const struct sockaddr_storage *like, struct sockaddr_storage *out)
{
    struct ifaddrs *list;
    struct sockaddr_storage a, best;
    int best_fit = 0, fit = 0;
    if (getifaddrs(&list) != 0)
        return tly_fail(errno, "cannot list the network interfaces: %s", strerror(errno));
    for (struct ifaddrs *i = list; i && fit >= 0; i = i->ifa_next) {
        fit = place_fitness(i, iface, like, &a);
        if (fit > best_fit) {
            best_fit = fit;
            best = a;
        }
    }
    freeifaddrs(list);
    if (fit < 0)
        return fit;
    if (!best_fit)
        return tly_fail(ENODEV, "TALLY_IFACE=%s: no interface that is up fits", iface);
    *out = best;
    return 0;
}

int tly_place_ports(const char *range, uint16_t *first, uint16_t *last)
{
    const char *at = range;
    double a, b;
    *first = *last = 0;
    if (!range)
        return 0;
    if (!tly_digits(&at, false, &a) || *at++ != '-' || !tly_digits(&at, false, &b) || *at || a < 1 ||
        b > 65535 || a > b)
        return tly_fail(EINVAL, "TALLY_PORTS=%s is no range A-B within 1-65535", range);
    *first = (uint16_t)a;
    *last = (uint16_t)b;
    return 0;
}
