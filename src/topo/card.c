/* card.c - the speed of a network card, from sysfs.
 *
 * A virtual interface's own speed means nothing (a veth says 10 Gbit/s whatever it carries): only that of a card
 * that is a device counts, and a bond's, which the kernel makes of its cards'.  What stands upon another (a VLAN, a
 * bridge, a macvlan) is as fast as the fastest below it. */
#include "topo/card.h"

#include <dirent.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { DEEPEST = 4, PATH_BYTES = 512 };

uint64_t tly_card_speed(const char *folder, const char *name)
{
    char path[PATH_BYTES];
    long long mbits = 0;
    snprintf(path, sizeof path, "%s/%s/speed", folder, name);
    FILE *f = fopen(path, "re");
    if (!f)
        return 0;
    bool read = fscanf(f, "%lld", &mbits) == 1; /* -1, or EINVAL, where the driver does not know */
    fclose(f);
    return read && mbits > 0 && mbits <= 1000000000 ? (uint64_t)mbits * 1000000 : 0;
}

static bool card_has(const char *folder, const char *name, const char *entry)
{
    char path[PATH_BYTES];
    snprintf(path, sizeof path, "%s/%s/%s", folder, name, entry);
    return access(path, F_OK) == 0;
}

static uint64_t card_rate_of(const char *folder, const char *name, int depth)
{
    char path[PATH_BYTES];
    uint64_t best = 0;
    if (card_has(folder, name, "device") || card_has(folder, name, "bonding"))
        return tly_card_speed(folder, name);
    snprintf(path, sizeof path, "%s/%s", folder, name);
    DIR *entries = depth < DEEPEST ? opendir(path) : NULL;
    if (!entries)
        return 0;
    for (const struct dirent *e; (e = readdir(entries));) {
        uint64_t rate =
            strncmp(e->d_name, "lower_", 6) == 0 ? card_rate_of(folder, e->d_name + 6, depth + 1) : 0;
        if (rate > best)
            best = rate;
    }
    closedir(entries);
    return best;
}

uint64_t tly_card_rate_of(const char *folder, const char *interface)
{
    return card_rate_of(folder, interface, 0);
}

static bool card_same_address(const struct sockaddr *a, const struct sockaddr_storage *b)
{
    if (!a || a->sa_family != b->ss_family)
        return false;
    if (a->sa_family == AF_INET)
        return ((const struct sockaddr_in *)a)->sin_addr.s_addr ==
               ((const struct sockaddr_in *)b)->sin_addr.s_addr;
    return a->sa_family == AF_INET6 && memcmp(&((const struct sockaddr_in6 *)a)->sin6_addr,
                                              &((const struct sockaddr_in6 *)b)->sin6_addr, 16) == 0;
}

uint64_t tly_card_rate(const struct sockaddr_storage *own)
{
    struct ifaddrs *list;
    uint64_t rate = 0;
    if (getifaddrs(&list) != 0)
        return 0;
    for (const struct ifaddrs *i = list; i; i = i->ifa_next)
        if (card_same_address(i->ifa_addr, own)) {
            rate = tly_card_rate_of("/sys/class/net", i->ifa_name);
            break;
        }
    freeifaddrs(list);
    return rate;
}
