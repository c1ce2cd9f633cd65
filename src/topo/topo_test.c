/* topo_test.c - cores and nodes of machines that hwloc makes up, and quotas of control groups in a folder.
 * What is read once is read in a child process each time. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "topo/topo.h"

/* Run in a child with HWLOC_SYNTHETIC set, NULL: on this machine; its result. */
static int on(const char *machine, int (*ask)(void))
{
    pid_t child = fork();
    if (child == 0) {
        if (machine)
            setenv("HWLOC_SYNTHETIC", machine, 1);
        _exit(ask());
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static int least(int a, int b)
{
    return b && b < a ? b : a;
}

static void test_cores(void **state)
{
    int quota = tly_topo_quota("");
    assert_int_equal(on("pack:2 numa:1 core:4 pu:2", tly_topo_cores), least(8, quota));
    assert_int_equal(on("core:3 pu:2", tly_topo_cores), least(3, quota));
}

/* One hardware thread is enough for a core to count. */
static int one_thread(void)
{
    cpu_set_t set;
    int cpu = sched_getcpu();
    CPU_ZERO(&set);
    CPU_SET((size_t)(cpu < 0 ? 0 : cpu), &set);
    return sched_setaffinity(0, sizeof set, &set) != 0 || tly_topo_cores() == 1;
}

static void test_affinity(void **state)
{
#ifdef __SANITIZE_THREAD__
    skip(); /* its thread in the background keeps the other cores, and counts as this process's */
#endif
    assert_int_equal(on(NULL, one_thread), 1);
}

/* Two sockets of two nodes each, two cores on a node. */
#define FOUR_NODES "pack:2 group:2 numa:1 core:2 pu:2"
static const int from_2[] = {2, 2, 3, 3, 0, 0, 1, 1, 2}, from_1[] = {1, 1, 0, 0, 2, 2, 3, 3, 1};

static int nodes_from_2(void)
{
    for (int i = 0; i < 9; i++)
        if (tly_topo_node(2, i) != from_2[i])
            return 100 + i;
    tly_topo_place(2, 0);
    return 0;
}

static int nodes_from_1(void)
{
    for (int i = 0; i < 9; i++)
        if (tly_topo_node(1, i) != from_1[i])
            return 100 + i;
    return 0;
}

/* Wherever the caller runs, its own node is filled first; a node that is not there is as good as none. */
static int nodes_from_here(void)
{
    int home = tly_topo_node(-1, 0);
    return home < 0 || tly_topo_node(-1, 1) != home || tly_topo_node(-1, 2) == home ||
           tly_topo_node(99, 0) < 0;
}

static int no_nodes(void)
{
    tly_topo_place(0, 0);
    return tly_topo_node(0, 0) != -1 || tly_topo_node(-1, 3) != -1;
}

static void test_nodes(void **state)
{
    assert_int_equal(on(FOUR_NODES, nodes_from_2), 0);
    assert_int_equal(on(FOUR_NODES, nodes_from_1), 0);
    assert_int_equal(on(FOUR_NODES, nodes_from_here), 0);
    assert_int_equal(on("numa:1 core:8 pu:1", no_nodes), 0);
}

static void test_card(void **state)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    assert_int_equal(tly_topo_card((const struct sockaddr *)&a), -1); /* no hardware */
    a.sin_addr.s_addr = inet_addr("192.0.2.1");
    assert_int_equal(tly_topo_card((const struct sockaddr *)&a), -1); /* nobody's */
}

/* --- quotas -------------------------------------------------------------------------------------------- */

static char root[64];

/* Writes a file below the root, and the folders that it needs. */
static void put(const char *path, const char *text)
{
    char whole[256];
    snprintf(whole, sizeof whole, "%s%s", root, path);
    for (char *slash = whole + strlen(root) + 1; (slash = strchr(slash, '/')); *slash++ = '/') {
        *slash = 0;
        mkdir(whole, 0700);
    }
    FILE *f = fopen(whole, "w");
    assert_non_null(f);
    fputs(text, f);
    assert_int_equal(fclose(f), 0);
}

static void test_quota(void **state)
{
    strcpy(root, "/tmp/tally-topo-XXXXXX");
    assert_non_null(mkdtemp(root));
    assert_int_equal(tly_topo_quota(root), 0);
    put("/proc/self/cgroup", "0::/\n");
    assert_int_equal(tly_topo_quota(root), 0);
    put("/sys/fs/cgroup/cpu.max", "max 100000\n");
    assert_int_equal(tly_topo_quota(root), 0);
    put("/sys/fs/cgroup/cpu.max", "250000 100000\n");
    assert_int_equal(tly_topo_quota(root), 3);

    /* The least of a group and those above it, whichever that is. */
    put("/proc/self/cgroup", "0::/system.slice/job.service\n");
    put("/sys/fs/cgroup/cpu.max", "max 100000\n");
    put("/sys/fs/cgroup/system.slice/cpu.max", "800000 100000\n");
    assert_int_equal(tly_topo_quota(root), 8);
    put("/sys/fs/cgroup/system.slice/job.service/cpu.max", "200000 50000\n");
    assert_int_equal(tly_topo_quota(root), 4);
    put("/sys/fs/cgroup/system.slice/cpu.max", "10000 100000\n");
    assert_int_equal(tly_topo_quota(root), 1);

    /* Version 1; a line with a controller of another name says nothing. */
    put("/proc/self/cgroup", "12:cpuset:/set\n4:cpuacct,cpu:/docker/1\n1:name=systemd:/docker/1\n");
    put("/sys/fs/cgroup/cpu/set/cpu.cfs_quota_us", "100000\n");
    put("/sys/fs/cgroup/cpu/set/cpu.cfs_period_us", "100000\n");
    put("/sys/fs/cgroup/cpu/docker/1/cpu.cfs_quota_us", "-1\n");
    put("/sys/fs/cgroup/cpu/docker/1/cpu.cfs_period_us", "100000\n");
    assert_int_equal(tly_topo_quota(root), 0);
    put("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "600000\n");
    put("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
    assert_int_equal(tly_topo_quota(root), 6);

    char command[96];
    snprintf(command, sizeof command, "rm -r '%s'", root);
    assert_int_equal(system(command), 0);
}

static void test_memory(void **state)
{
    strcpy(root, "/tmp/tally-topo-XXXXXX");
    assert_non_null(mkdtemp(root));
    assert_true(tly_topo_memory(root).room == UINT64_MAX);
    put("/proc/self/cgroup", "0::/system.slice/job.service\n");
    put("/sys/fs/cgroup/system.slice/job.service/memory.max", "max\n");
    put("/sys/fs/cgroup/system.slice/job.service/memory.current", "700\n");
    assert_true(tly_topo_memory(root).room == UINT64_MAX);
    assert_true(tly_topo_memory(root).limit == UINT64_MAX);
    put("/sys/fs/cgroup/system.slice/memory.max", "1000\n");
    put("/sys/fs/cgroup/system.slice/memory.current", "900\n");
    assert_true(tly_topo_memory(root).room == 100);
    assert_true(tly_topo_memory(root).limit == 1000);
    put("/sys/fs/cgroup/system.slice/memory.stat", "anon 600\ninactive_file 20\nactive_file 30\n");
    assert_true(tly_topo_memory(root).room == 150);
    put("/sys/fs/cgroup/system.slice/job.service/memory.max", "710\n");
    assert_true(tly_topo_memory(root).room == 10);
    put("/sys/fs/cgroup/system.slice/job.service/memory.current", "720\n");
    assert_true(tly_topo_memory(root).room == 0);
    assert_true(tly_topo_memory(root).limit == 710);

    /* Version 1: -1 is printed as a large number; files of the groups below are in the total. */
    put("/proc/self/cgroup", "4:memory:/docker/1\n1:name=systemd:/docker/1\n");
    put("/sys/fs/cgroup/memory/docker/1/memory.limit_in_bytes", "9223372036854771712\n");
    put("/sys/fs/cgroup/memory/docker/1/memory.usage_in_bytes", "500\n");
    put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "2000\n");
    put("/sys/fs/cgroup/memory/memory.usage_in_bytes", "500\n");
    put("/sys/fs/cgroup/memory/memory.stat", "inactive_file 1\ntotal_inactive_file 7\ntotal_active_file 3\n");
    assert_true(tly_topo_memory(root).room == 1510);
    assert_true(tly_topo_memory(root).limit == 2000);

    char command[96];
    snprintf(command, sizeof command, "rm -r '%s'", root);
    assert_int_equal(system(command), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cores), cmocka_unit_test(test_affinity), cmocka_unit_test(test_nodes),
        cmocka_unit_test(test_card),  cmocka_unit_test(test_quota),    cmocka_unit_test(test_memory),
    };
    return cmocka_run_group_tests_name("topo", tests, NULL, NULL);
}
