/* topo.c - hwloc's view of the machine, cut down to what is asked. */
#include "topo/topo.h"

#include <hwloc.h>
#include <ifaddrs.h>
#include <limits.h>
#include <net/if.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Loaded once, never changed: read by any thread. */
static hwloc_topology_t topology;
static hwloc_bitmap_t allowed;
static bool loaded;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void topo_load(void)
{
    if (hwloc_topology_init(&topology) != 0)
        return;
    allowed = hwloc_bitmap_alloc();
    loaded = allowed && hwloc_topology_load(topology) == 0 &&
             hwloc_get_cpubind(topology, allowed, HWLOC_CPUBIND_PROCESS) == 0;
}

/* --- how many cores -------------------------------------------------------------------------------------- */

/* Numbers from a file of one line: how many there are, 0 also for the word "max". */
static int topo_read_numbers(const char *path, long long *first, long long *second)
{
    FILE *f = fopen(path, "re");
    if (!f)
        return 0;
    int n = fscanf(f, "%lld %lld", first, second);
    fclose(f);
    return n > 0 ? n : 0;
}

/* Does a line of /proc/self/cgroup, "NUMBER:CONTROLLERS:PATH", speak of this controller? */
static bool topo_rules(const char *controllers, size_t length, const char *what)
{
    if (length == 0) /* version 2 */
        return true;
    for (const char *c = controllers, *end = c + length; c < end; c += strcspn(c, ",:") + 1)
        if (strcspn(c, ",:") == strlen(what) && strncmp(c, what, strlen(what)) == 0)
            return true;
    return false;
}

/* look(user, folder) for this process's group of a controller and those above it. */
static void topo_each_group(const char *root, const char *what, void (*look)(void *user, const char *folder),
                            void *user)
{
    char line[PATH_MAX], folder[PATH_MAX];
    snprintf(folder, sizeof folder, "%s/proc/self/cgroup", root);
    FILE *f = fopen(folder, "re");
    if (!f)
        return;
    while (fgets(line, sizeof line, f)) {
        char *controllers = strchr(line, ':'), *path = controllers ? strchr(++controllers, ':') : NULL;
        if (!path || !topo_rules(controllers, (size_t)(path - controllers), what))
            continue;
        bool second = path == controllers;
        path[strcspn(path, "\n")] = 0;
        /* A container may see only its own part of the tree: groups that are not there have no limit. */
        for (path++;; *strrchr(path, '/') = 0) {
            int n = snprintf(folder, sizeof folder, "%s/sys/fs/cgroup%s%s%s", root, second ? "" : "/",
                             second ? "" : what, path);
            if (n < (int)sizeof folder)
                look(user, folder);
            if (!strchr(path, '/'))
                break;
        }
    }
    fclose(f);
}

/* The quota of one group, in cores, lowers the least that is known; 0: none. */
static void topo_look_at_quota(void *user, const char *folder)
{
    char path[PATH_MAX + 32];
    long long us, period, none;
    int *least = user;
    snprintf(path, sizeof path, "%s/cpu.max", folder); /* "QUOTA PERIOD" or "max PERIOD" */
    bool limited = topo_read_numbers(path, &us, &period) == 2;
    if (!limited) { /* version 1: -1 for none */
        snprintf(path, sizeof path, "%s/cpu.cfs_quota_us", folder);
        limited = topo_read_numbers(path, &us, &none) >= 1;
        snprintf(path, sizeof path, "%s/cpu.cfs_period_us", folder);
        limited = limited && topo_read_numbers(path, &period, &none) >= 1;
    }
    int cores = limited && us > 0 && period > 0 ? (int)((us + period - 1) / period) : 0;
    if (cores && (!*least || cores < *least))
        *least = cores;
}

int tly_topo_quota(const char *root)
{
    int least = 0;
    topo_each_group(root, "cpu", topo_look_at_quota, &least);
    return least;
}

/* Pages of files, which a group gives back before it meets its limit; version 1 counts those of groups below apart. */
static long long topo_of_files(const char *folder)
{
    static const char *const names[] = {"total_inactive_file ", "total_active_file ", "inactive_file ",
                                        "active_file "};
    char path[PATH_MAX + 32], line[128];
    long long found[4] = {-1, -1, -1, -1};
    snprintf(path, sizeof path, "%s/memory.stat", folder);
    FILE *f = fopen(path, "re");
    while (f && fgets(line, sizeof line, f))
        for (int i = 0; i < 4; i++)
            if (strncmp(line, names[i], strlen(names[i])) == 0)
                found[i] = atoll(line + strlen(names[i]));
    if (f)
        fclose(f);
    int from = found[0] >= 0 ? 0 : 2;
    return (found[from] > 0 ? found[from] : 0) + (found[from + 1] > 0 ? found[from + 1] : 0);
}

static void topo_look_at_memory(void *user, const char *folder)
{
    static const char *const limits[] = {"memory.max", "memory.limit_in_bytes"};
    static const char *const used[] = {"memory.current", "memory.usage_in_bytes"};
    char path[PATH_MAX + 32];
    long long limit, now, none;
    struct tly_topo_memory *least = user;
    for (int version = 0; version < 2; version++) {
        snprintf(path, sizeof path, "%s/%s", folder, limits[version]);
        if (topo_read_numbers(path, &limit, &none) < 1)
            continue; /* "max" is no number */
        if (limit >= 0 && (uint64_t)limit < least->limit)
            least->limit = (uint64_t)limit;
        snprintf(path, sizeof path, "%s/%s", folder, used[version]);
        if (topo_read_numbers(path, &now, &none) < 1)
            continue;
        long long room = limit - now + topo_of_files(folder);
        room = room < 0 ? 0 : room;
        if ((uint64_t)room < least->room)
            least->room = (uint64_t)room;
    }
}

struct tly_topo_memory tly_topo_memory(const char *root)
{
    struct tly_topo_memory least = {UINT64_MAX, UINT64_MAX};
    topo_each_group(root, "memory", topo_look_at_memory, &least);
    return least;
}

int tly_topo_cores(void)
{
    pthread_once(&once, topo_load);
    int cores = 0, limit = tly_topo_quota("");
    for (hwloc_obj_t core = NULL;
         loaded && (core = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_CORE, core));)
        cores += hwloc_bitmap_intersects(core->cpuset, allowed);
    if (limit && limit < cores)
        cores = limit;
    return cores > 1 ? cores : 1;
}

/* --- where ------------------------------------------------------------------------------------------------- */

static bool topo_same_address(const struct sockaddr *a, const struct sockaddr *b)
{
    if (!a || !b || a->sa_family != b->sa_family)
        return false;
    if (a->sa_family == AF_INET)
        return ((const struct sockaddr_in *)a)->sin_addr.s_addr ==
               ((const struct sockaddr_in *)b)->sin_addr.s_addr;
    return a->sa_family == AF_INET6 &&
           memcmp(&((const struct sockaddr_in6 *)a)->sin6_addr, &((const struct sockaddr_in6 *)b)->sin6_addr,
                  sizeof(struct in6_addr)) == 0;
}

int tly_topo_card(const struct sockaddr *address)
{
    struct ifaddrs *all;
    long long node = -1, none;
    if (getifaddrs(&all) != 0)
        return -1;
    for (struct ifaddrs *i = all; i; i = i->ifa_next)
        if (topo_same_address(i->ifa_addr, address)) {
            char path[64 + IF_NAMESIZE];
            snprintf(path, sizeof path, "/sys/class/net/%s/device/numa_node", i->ifa_name);
            if (topo_read_numbers(path, &node, &none) < 1)
                node = -1;
            break;
        }
    freeifaddrs(all);
    return (int)node;
}

static hwloc_obj_t topo_node_of(hwloc_obj_t core)
{
    return hwloc_get_numanode_obj_by_os_index(topology, (unsigned)hwloc_bitmap_first(core->nodeset));
}

/* A core to begin with: on node `home`, or where the caller runs, or any. */
static hwloc_obj_t topo_first_core(int home)
{
    hwloc_bitmap_t here = hwloc_bitmap_alloc();
    hwloc_obj_t core = NULL, best = NULL;
    if (!here || hwloc_get_last_cpu_location(topology, here, HWLOC_CPUBIND_THREAD) != 0)
        hwloc_bitmap_free(here), here = NULL;
    while ((core = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_CORE, core))) {
        bool fits = home >= 0 ? hwloc_bitmap_isset(core->nodeset, (unsigned)home)
                              : here && hwloc_bitmap_intersects(core->cpuset, here);
        if (!best || fits)
            best = core;
        if (fits)
            break;
    }
    hwloc_bitmap_free(here);
    return best;
}

/* The node of the index-th usable core, counted from the first one on, nearest first. */
static hwloc_obj_t topo_choose(int home, int index)
{
    pthread_once(&once, topo_load);
    if (!loaded || index < 0 || hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_NUMANODE) < 2)
        return NULL;
    int cores = hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_CORE), usable = 0;
    hwloc_obj_t first = topo_first_core(home), found = NULL;
    hwloc_obj_t *near = first && cores > 0 ? calloc((size_t)cores, sizeof *near) : NULL;
    if (!near)
        return NULL;
    near[0] = first;
    cores = 1 + (int)hwloc_get_closest_objs(topology, first, near + 1, (unsigned)cores - 1);
    for (int i = 0; i < cores; i++)
        if (hwloc_bitmap_intersects(near[i]->cpuset, allowed))
            near[usable++] = near[i];
    if (usable)
        found = topo_node_of(near[index % usable]);
    free(near);
    return found;
}

int tly_topo_node(int home, int index)
{
    hwloc_obj_t node = topo_choose(home, index);
    return node ? (int)node->os_index : -1;
}

void tly_topo_place(int home, int index)
{
    hwloc_obj_t node = topo_choose(home, index);
    hwloc_bitmap_t set = node ? hwloc_bitmap_alloc() : NULL;
    if (set) {
        hwloc_bitmap_and(set, node->cpuset, allowed);
        if (!hwloc_bitmap_iszero(set))
            hwloc_set_cpubind(topology, set, HWLOC_CPUBIND_THREAD); /* a wish: EPERM is no error */
    }
    hwloc_bitmap_free(set);
}
