/* place_test.c - launchers' variables, addresses, secrets, lists of hosts and ports. */
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <sodium.h>
#include <cmocka.h>

#include "base/error.h"
#include "membership/place.h"
#include "transport/address.h"

static const char *const variables[] = {
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "PMI_RANK",
    "PMI_SIZE",
    "PMIX_RANK",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_ID",
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_NUM_NODES",
    "SLURM_JOB_ID",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TALLY_SECRET"};

static char home[] = "/tmp/tally-place-XXXXXX";

static int clean(void **state)
{
    for (size_t i = 0; i < sizeof variables / sizeof *variables; i++)
        unsetenv(variables[i]);
    unsetenv("XDG_CONFIG_HOME");
    setenv("HOME", home, 1);
    return 0;
}

static int find(struct tly_place *p, const char *const settings[], bool is_rank)
{
    struct tly_params params;
    char why[TLY_SENTENCE];
    if (tly_params_load(&params, settings, why, sizeof why) != 0)
        fail_msg("%s", why);
    int err = tly_place_find(p, &params, is_rank);
    tly_params_finish(&params);
    return err;
}

static void assert_rank(uint32_t rank, uint32_t size, const char *coordinator)
{
    struct tly_place p;
    if (find(&p, NULL, true) != 0)
        fail_msg("%s", tly_error());
    assert_int_equal(p.rank, rank);
    assert_int_equal(p.size, size);
    assert_string_equal(p.coord_host, coordinator);
}

static void assert_refused(const char *named)
{
    struct tly_place p;
    assert_int_equal(find(&p, NULL, true), -EINVAL);
    if (!strstr(tly_error(), named))
        fail_msg("'%s' does not name %s", tly_error(), named);
}

static void launchers(void **state)
{
    assert_rank(0, 1, ""); /* started by nobody */
    setenv("SLURM_PROCID", "0", 1);
    setenv("SLURM_STEP_NUM_TASKS", "8", 1);
    assert_rank(0, 1, ""); /* a batch shell, no step */
    setenv("SLURM_PROCID", "3", 1);
    assert_refused("SLURM_PROCID=3"); /* one of many, nobody knows of how many */
    setenv("PMIX_RANK", "0", 1);
    assert_refused("PMIX_RANK");
    setenv("SLURM_STEP_ID", "0", 1);
    setenv("SLURM_STEP_NODELIST", "gpu[07-09,12]", 1);
    assert_rank(3, 8, "gpu07");
    setenv("MASTER_ADDR", "10.0.0.1", 1);
    setenv("PMI_RANK", "2", 1);
    setenv("PMI_SIZE", "4", 1);
    assert_rank(2, 4, "10.0.0.1");
    setenv("OMPI_COMM_WORLD_RANK", "1", 1);
    setenv("OMPI_COMM_WORLD_SIZE", "5", 1);
    assert_rank(1, 5, "10.0.0.1");
    unsetenv("MASTER_ADDR");
    assert_refused("mpirun -x MASTER_ADDR"); /* the step is that of mpirun's daemons */
    setenv("MASTER_ADDR", "10.0.0.1", 1);
    setenv("RANK", "6", 1);
    setenv("WORLD_SIZE", "7", 1);
    assert_rank(6, 7, "10.0.0.1");
}

/* All ranks on one machine: no address is needed, and what the launcher calls the machine does not matter. */
static void one_machine(void **state)
{
    struct tly_place p;
    struct tly_addresses to;
    setenv("OMPI_COMM_WORLD_RANK", "1", 1);
    setenv("OMPI_COMM_WORLD_SIZE", "4", 1);
    assert_int_equal(find(&p, NULL, true), -EINVAL);
    setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2", 1);
    assert_int_equal(find(&p, NULL, true), -EINVAL);
    setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "4", 1);
    assert_rank(1, 4, "127.0.0.1");
    setenv("RANK", "1", 1);
    setenv("WORLD_SIZE", "2", 1);
    setenv("LOCAL_WORLD_SIZE", "2", 1);
    setenv("MASTER_ADDR", "192.0.2.7", 1);
    assert_rank(1, 2, "192.0.2.7");
    assert_int_equal(find(&p, NULL, true), 0);
    assert_int_equal(tly_place_resolve(&p, &to), 0); /* there is no secret that others could prove */
    assert_int_equal(to.count, 1);
    assert_true(tly_address_is_loopback(&to.at[0]));
    setenv("TALLY_SECRET", "sixteen bytes ok", 1);
    assert_int_equal(find(&p, NULL, true), 0);
    assert_int_equal(tly_place_resolve(&p, &to), 0);
    assert_false(tly_address_is_loopback(&to.at[0]));
    unsetenv("TALLY_SECRET");
    setenv("LOCAL_WORLD_SIZE", "1", 1);
    assert_int_equal(find(&p, NULL, true), 0);
    assert_int_equal(tly_place_resolve(&p, &to), -EACCES);
}

static int resolve(const char *coordinator, bool secret, struct tly_addresses *to)
{
    struct tly_place p;
    char text[300];
    snprintf(text, sizeof text, "TALLY_COORD=%s", coordinator);
    const char *const settings[] = {text, secret ? "TALLY_SECRET=sixteen bytes ok" : NULL, NULL};
    assert_int_equal(find(&p, settings, false), 0);
    return tly_place_resolve(&p, to);
}

static void resolving(void **state)
{
    struct tly_addresses to;
    assert_int_equal(resolve("192.0.2.1:5", true, &to), 0);
    assert_int_equal(to.count, 1);
    assert_false(to.named);
    assert_int_equal(tly_address_port(&to.at[0]), 5);
    assert_int_equal(resolve("fd77::1", true, &to), 0);
    assert_int_equal(to.at[0].ss_family, AF_INET6);
    assert_int_equal(resolve("[fd77::1]:7", true, &to), 0);
    assert_int_equal(tly_address_port(&to.at[0]), 7);
    assert_int_equal(resolve("localhost", false, &to), 0);
    assert_false(to.named);
    assert_true(tly_address_is_loopback(&to.at[0]));
    assert_int_equal(resolve("192.0.2.1", false, &to), -EACCES);
    assert_non_null(strstr(tly_error(), "tally secret"));
    /* Without a secret any address of this machine is as good as loopback, which alone listens. */
    char own[64] = "";
    struct ifaddrs *all;
    struct sockaddr_storage a;
    assert_int_equal(getifaddrs(&all), 0);
    for (const struct ifaddrs *i = all; i && !own[0]; i = i->ifa_next) {
        if (!i->ifa_addr || i->ifa_addr->sa_family != AF_INET || (i->ifa_flags & IFF_LOOPBACK))
            continue;
        memcpy(&a, i->ifa_addr, sizeof(struct sockaddr_in));
        tly_address_host(&a, own, sizeof own);
    }
    freeifaddrs(all);
    const char *const here[] = {"0.0.0.0", "[::]", own};
    for (size_t i = 0; i < 3 - !own[0]; i++) {
        assert_int_equal(resolve(here[i], false, &to), 0);
        assert_true(tly_address_is_loopback(&to.at[0]));
        assert_int_equal(resolve(here[i], true, &to), 0);
        assert_int_equal(tly_address_is_loopback(&to.at[0]), i < 2); /* 0.0.0.0 is no address to connect to */
        assert_int_equal(to.named, i < 2);
    }
    assert_int_equal(resolve("fe80::1%lo", true, &to), -EINVAL);
    assert_non_null(strstr(tly_error(), "link-local"));
    assert_int_equal(resolve("fe80::1", true, &to), -EINVAL);
    assert_int_equal(resolve("no-such-host.invalid", true, &to), -EAGAIN); /* reserved: RFC 6761 */
    assert_non_null(strstr(tly_error(), "no-such-host.invalid"));
    assert_non_null(strstr(tly_error(), "TALLY_COORD"));
}

static void nonsense_is_refused_by_name(void **state)
{
    setenv("RANK", "0", 1);
    assert_refused("WORLD_SIZE");
    setenv("WORLD_SIZE", "2", 1);
    assert_refused("TALLY_COORD");
    setenv("MASTER_ADDR", "localhost", 1);
    setenv("RANK", "2", 1);
    assert_refused("RANK=2");
    static const char *const bad[] = {"1x", " 1", "+1", "-1", "0x1", "1e0", "1.", "4294967297"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        setenv("RANK", bad[i], 1);
        char said[32];
        snprintf(said, sizeof said, "RANK=%s", bad[i]);
        assert_refused(said);
    }
    setenv("RANK", "1", 1);
    setenv("LOCAL_WORLD_SIZE", " 2", 1);
    assert_refused("LOCAL_WORLD_SIZE= 2");
    unsetenv("LOCAL_WORLD_SIZE");
    setenv("TORCHELASTIC_RESTART_COUNT", "-1", 1);
    assert_refused("TORCHELASTIC_RESTART_COUNT");
}

static void job_names(void **state)
{
    struct tly_place p;
    const char *const named[] = {"TALLY_JOB=none", NULL};
    assert_int_equal(find(&p, NULL, true), 0);
    assert_string_equal(p.job, "default");
    setenv("TORCHELASTIC_RUN_ID", "none", 1); /* what torchrun says when it was told nothing */
    assert_int_equal(find(&p, NULL, true), 0);
    assert_string_equal(p.job, "default");
    setenv("SLURM_JOB_ID", "77", 1);
    assert_int_equal(find(&p, NULL, true), 0);
    assert_string_equal(p.job, "77");
    setenv("TORCHELASTIC_RUN_ID", "run1", 1);
    assert_int_equal(find(&p, NULL, true), 0);
    assert_string_equal(p.job, "run1");
    assert_int_equal(find(&p, named, true), 0);
    assert_string_equal(p.job, "none");
    const char *const daemon[] = {"TALLY_COORD=localhost", NULL};
    assert_int_equal(find(&p, daemon, false), 0);
    assert_string_equal(p.job, "");
}

/* Names that are longer than what has room for them are told apart where they end. */
static void long_names(void **state)
{
    static struct tly_place p[2];
    char job[2][320], id[2][320];
    for (int i = 0; i < 2; i++) {
        snprintf(job[i], sizeof job[i], "TALLY_JOB=%0299d%d", 0, i);
        snprintf(id[i], sizeof id[i], "TALLY_HOST_ID=pod-%0299d%d", 0, i);
        const char *const settings[] = {job[i], id[i], NULL};
        assert_int_equal(find(&p[i], settings, true), 0);
        assert_int_equal(strncmp(p[i].host_id, "pod-000", 7), 0);
    }
    assert_string_not_equal(p[0].job, p[1].job);
    assert_string_not_equal(p[0].host_id, p[1].host_id);
    const char *const settings[] = {job[1], id[1], NULL};
    assert_int_equal(find(&p[0], settings, true), 0);
    assert_string_equal(p[0].job, p[1].job);
    assert_string_equal(p[0].host_id, p[1].host_id);
}

/* A step of one node is on one machine, wherever its list says that it is. */
static void step_of_one_node(void **state)
{
    struct tly_place p;
    struct tly_addresses at;
    setenv("SLURM_STEP_ID", "0", 1);
    setenv("SLURM_PROCID", "1", 1);
    setenv("SLURM_STEP_NUM_TASKS", "2", 1);
    setenv("SLURM_STEP_NODELIST", "192.0.2.2", 1);
    setenv("SLURM_STEP_NUM_NODES", "2", 1);
    assert_int_equal(find(&p, NULL, true), 0);
    assert_int_equal(tly_place_resolve(&p, &at), -EACCES);
    setenv("SLURM_STEP_NUM_NODES", "1", 1);
    assert_int_equal(find(&p, NULL, true), 0);
    assert_int_equal(tly_place_resolve(&p, &at), 0);
    assert_true(tly_address_is_loopback(&at.at[0]));
}

static void a_given_rank_replaces_the_launchers(void **state)
{
    struct tly_place p;
    const char *const launched[] = {"TALLY_RANK=1/2", NULL};
    const char *const beside[] = {"TALLY_RANK=1/2", "TALLY_BESIDE=1", NULL};
    static const char *const wrong[] = {"TALLY_RANK=1", "TALLY_RANK=2/2", "TALLY_RANK=1/2x",
                                        "TALLY_RANK=0/0"};
    setenv("RANK", "7", 1);
    setenv("WORLD_SIZE", "9", 1);
    setenv("LOCAL_WORLD_SIZE", "2", 1);
    setenv("TORCHELASTIC_RESTART_COUNT", "3", 1);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    assert_int_equal(find(&p, launched, true), 0);
    assert_int_equal(p.rank, 1);
    assert_int_equal(p.size, 2);
    assert_true(p.together);
    assert_int_equal(p.restart, 3);
    assert_int_equal(find(&p, beside, true), 0);
    assert_int_equal(p.rank, 1);
    assert_int_equal(p.size, 2);
    assert_false(p.together);
    assert_false(p.apart);
    assert_int_equal(p.restart, -1);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        const char *const settings[] = {wrong[i], NULL};
        assert_int_equal(find(&p, settings, true), -EINVAL);
        assert_non_null(strstr(tly_error(), "TALLY_RANK"));
    }
}

static void coordinator_addresses(void **state)
{
    static const struct {
        const char *text, *host;
        int port; /* 0: refused */
    } cases[] = {{"TALLY_COORD=a.b", "a.b", 29777}, {"TALLY_COORD=a.b:5", "a.b", 5},
                 {"TALLY_COORD=[::1]:7", "::1", 7}, {"TALLY_COORD=[fe80::1]", "fe80::1", 29777},
                 {"TALLY_COORD=::1", "::1", 29777}, {"TALLY_COORD=a:0", "", 0},
                 {"TALLY_COORD=a:70000", "", 0},    {"TALLY_COORD=a:", "", 0},
                 {"TALLY_COORD=[::1", "", 0},       {"TALLY_COORD=:5", "", 0},
                 {"TALLY_COORD=[::1]5", "", 0},     {"TALLY_COORD=a:5x", "", 0},
                 {"TALLY_COORD=a:+5", "", 0},       {"TALLY_COORD=a: 5", "", 0},
                 {"TALLY_COORD=::1:29777", "", 0},  {"TALLY_COORD=fe80::1%lo", "fe80::1%lo", 29777}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct tly_place p;
        const char *const settings[] = {cases[i].text, NULL};
        int err = find(&p, settings, true);
        if (!cases[i].port) {
            assert_int_equal(err, -EINVAL);
            continue;
        }
        assert_int_equal(err, 0);
        assert_string_equal(p.coord_host, cases[i].host);
        assert_int_equal(p.coord_port, cases[i].port);
    }
    struct tly_place p;
    struct tly_addresses to;
    const char *const from[] = {"TALLY_COORD=no-such-host.invalid", "TALLY_COORD_FROM=the store", NULL};
    assert_int_equal(find(&p, from, false), 0);
    assert_int_equal(tly_place_resolve(&p, &to), -EAGAIN);
    assert_non_null(strstr(tly_error(), "(the store)"));
    assert_int_equal(find(&p, NULL, false), -EINVAL); /* a tallyd must be told */
    setenv("SLURM_STEP_ID", "1", 1);                  /* its step need not be the ranks' */
    setenv("SLURM_STEP_NODELIST", "c[1-2]", 1);
    assert_int_equal(find(&p, NULL, false), -EINVAL);
    assert_non_null(strstr(tly_error(), "give --coord"));
}

static void node_lists(void **state)
{
    static const char *const cases[][2] = {
        {"n1", "n1"},         {"n1,n2", "n1"},
        {"n[1-3]", "n1"},     {"n[08,11]", "n08"},
        {"a[3]b,c", "a3b"},   {"rack-2-[10-12]", "rack-2-10"},
        {"[1-2]x", "1x"},     {"", NULL},
        {",a", NULL},         {"n[", NULL},
        {"n[]", NULL},        {"n[a-b]", NULL},
        {"n[1-2", NULL},      {"n[1", NULL},
        {"n[1-2][3]", "n13"}, {"rack[1-2]node[007-16,20],x", "rack1node007"},
        {"n[1-3,7]", "n1"},   {"a1-b[2]", "a1-b2"},
        {"n]", NULL},         {"n[[1]]", NULL},
        {"n[-1]", NULL},      {"a-name-of-more-than-thirty-one-letters", NULL}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char out[32];
        int err = tly_place_first_host(cases[i][0], out, sizeof out);
        assert_int_equal(err, cases[i][1] ? 0 : -EINVAL);
        if (!err)
            assert_string_equal(out, cases[i][1]);
    }
}

static void port_ranges(void **state)
{
    uint16_t a, b;
    assert_int_equal(tly_place_ports("100-200", &a, &b), 0);
    assert_int_equal(a, 100);
    assert_int_equal(b, 200);
    assert_int_equal(tly_place_ports(NULL, &a, &b), 0);
    assert_int_equal(a, 0);
    static const char *const bad[] = {
        "",
        "5",
        "7-3",
        "0-9",
        "1-70000",
        "1-2x",
        "a-b",
        "4294998297-4294998299",
        "+31001-+31003",
        " 31001-  31003",
        "1-",
        "-1"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_int_equal(tly_place_ports(bad[i], &a, &b), -EINVAL);
}

static void secrets(void **state)
{
    struct tly_place p, q;
    char path[128], setting[160];
    const char *const given[] = {"TALLY_SECRET=sixteen bytes ok", NULL};
    const char *const file[] = {setting, NULL};
    snprintf(path, sizeof path, "%s/secret", home);
    snprintf(setting, sizeof setting, "TALLY_SECRET_FILE=%s", path);
    assert_int_equal(find(&p, NULL, true), 0);
    assert_false(p.has_secret);
    assert_int_equal(find(&p, given, true), 0);
    assert_true(p.has_secret);

    assert_int_equal(find(&q, file, true), -EINVAL); /* no such file */
    FILE *f = fopen(path, "w");
    fputs("sixteen bytes ok\n", f);
    fclose(f);
    chmod(path, 0644);
    assert_int_equal(find(&q, file, true), -EINVAL);
    assert_non_null(strstr(tly_error(), "chmod 600"));
    chmod(path, 0600);
    assert_int_equal(find(&q, file, true), 0);
    assert_memory_equal(p.secret, q.secret, sizeof p.secret); /* the line's end is not part of it */
    f = fopen(path, "w");
    fputs("too short\n", f);
    fclose(f);
    assert_int_equal(find(&q, file, true), -EINVAL);
    unlink(path);
}

static void own_addresses(void **state)
{
    struct sockaddr_storage a;
    assert_int_equal(tly_address_parse("127.0.0.1", 1, &a), 0);
    assert_true(tly_place_is_own(&a));
    assert_int_equal(tly_address_parse("192.0.2.1", 1, &a), 0); /* reserved for documents */
    assert_false(tly_place_is_own(&a));
    assert_int_equal(tly_place_iface("no-such-interface", &a, &a), -ENODEV);
    assert_int_equal(tly_place_iface("127.0.0.0/8", &a, &a), -ENODEV); /* loopback must be named */
    assert_int_equal(tly_place_iface("lo", &a, &a), 0);
    assert_true(tly_address_is_loopback(&a));
    struct sockaddr_storage like = a;
    assert_int_equal(tly_address_parse("::1", 0, &like), 0);
    assert_int_equal(tly_place_iface("lo,eth0", &a, &a), 0);
    assert_true(tly_address_is_loopback(&a));
    /* A name that holds another one's is another name. */
    if (tly_place_iface("^slow0", &like, &a) == 0)
        assert_false(tly_address_is_loopback(&a));
    assert_int_equal(tly_place_iface("lo,^lo", &like, &a), -ENODEV);
    assert_int_equal(tly_place_iface("lo,^127.0.0.0/8,^::/0", &like, &a), -ENODEV);
    static const char *const bad[] = {"10.0.0.0/x", "10.0.0.0/33", "10.0.0.0/", "10.0.0.0/+8", "a/8",
                                      "::/129",     "^",           "lo,,^",     ",lo"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_int_equal(tly_place_iface(bad[i], &like, &a), -EINVAL);
}

static void kinds_of_addresses(void **state)
{
    struct sockaddr_storage a;
    char text[80];
    assert_int_equal(tly_address_parse("::ffff:10.1.2.3", 9, &a), 0);
    tly_address_unmap(&a);
    tly_address_text(&a, text, sizeof text);
    assert_string_equal(text, "10.1.2.3:9");
    assert_int_equal(tly_address_parse("fd77::3", 9, &a), 0);
    tly_address_unmap(&a);
    tly_address_text(&a, text, sizeof text);
    assert_string_equal(text, "[fd77::3]:9");
    assert_false(tly_address_is_any(&a));
    tly_address_any(&a);
    assert_true(tly_address_is_any(&a));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(launchers, clean),
        cmocka_unit_test_setup(nonsense_is_refused_by_name, clean),
        cmocka_unit_test_setup(one_machine, clean),
        cmocka_unit_test_setup(resolving, clean),
        cmocka_unit_test(kinds_of_addresses),
        cmocka_unit_test_setup(job_names, clean),
        cmocka_unit_test_setup(long_names, clean),
        cmocka_unit_test_setup(step_of_one_node, clean),
        cmocka_unit_test_setup(a_given_rank_replaces_the_launchers, clean),
        cmocka_unit_test_setup(coordinator_addresses, clean),
        cmocka_unit_test_setup(node_lists, clean),
        cmocka_unit_test_setup(port_ranges, clean),
        cmocka_unit_test_setup(secrets, clean),
        cmocka_unit_test_setup(own_addresses, clean),
    };
    if (sodium_init() < 0 || !mkdtemp(home))
        return 1;
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    rmdir(home);
    return failed;
}
