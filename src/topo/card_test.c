/* card_test.c - the speed of cards, in a folder made to look like /sys/class/net. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <arpa/inet.h>
#include <ftw.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "topo/card.h"

static char folder[] = "/tmp/tally-card-test-XXXXXX";

static void make(const char *name, const char *speed, const char *entries)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    assert_int_equal(mkdir(path, 0755), 0);
    for (const char *e = entries; *e;) {
        char word[64];
        int n = 0;
        assert_int_equal(sscanf(e, " %63s%n", word, &n), 1);
        snprintf(path, sizeof path, "%s/%s/%s", folder, name, word);
        assert_int_equal(mkdir(path, 0755), 0);
        e += n;
    }
    if (!speed)
        return;
    snprintf(path, sizeof path, "%s/%s/speed", folder, name);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fprintf(f, "%s\n", speed);
    fclose(f);
}

static int build(void **state)
{
    assert_non_null(mkdtemp(folder));
    make("eth0", "25000", "device");
    make("eth1", "1000", "device");
    make("virtio", "-1", "device");
    make("silent", NULL, "device");
    make("mad", "99999999999999999999", "device");
    make("veth", "10000", "queues");
    make("lo", NULL, "queues");
    make("eth0.7", "25000", "lower_eth0");
    make("bond0", "50000", "bonding lower_eth0 lower_eth1");
    make("bond0.3", NULL, "lower_bond0");
    make("br0", "10000", "lower_veth lower_eth1");
    make("loop1", NULL, "lower_loop2");
    make("loop2", NULL, "lower_loop1");
    return 0;
}

static int drop(const char *path, const struct stat *st, int type, struct FTW *at)
{
    return remove(path);
}

static int tear_down(void **state)
{
    return nftw(folder, drop, 8, FTW_DEPTH | FTW_PHYS);
}

static void cards_say_their_speed(void **state)
{
    static const struct {
        const char *name;
        uint64_t mbits;
    } cases[] = {{"eth0", 25000}, {"eth1", 1000}, {"virtio", 0},     {"silent", 0},    {"mad", 0},
                 {"veth", 0},     {"lo", 0},      {"eth0.7", 25000}, {"bond0", 50000}, {"bond0.3", 50000},
                 {"br0", 1000},   {"loop1", 0},   {"not-there", 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (tly_card_rate_of(folder, cases[i].name) != cases[i].mbits * 1000000)
            fail_msg("%s: %llu", cases[i].name, (unsigned long long)tly_card_rate_of(folder, cases[i].name));
}

static void loopback_and_foreign_addresses_are_unknown(void **state)
{
    struct sockaddr_storage a = {0};
    struct sockaddr_in *four = (struct sockaddr_in *)&a;
    four->sin_family = AF_INET;
    four->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    assert_true(tly_card_rate(&a) == 0);
    four->sin_addr.s_addr = inet_addr("203.0.113.7");
    assert_true(tly_card_rate(&a) == 0);
    struct sockaddr_in6 *six = (struct sockaddr_in6 *)&a;
    *six = (struct sockaddr_in6){.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    assert_true(tly_card_rate(&a) == 0);
}

static void write_file(const char *name, const char *text)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static void rdma_devices_say_their_speed(void **state)
{
    make("mlx5_0", NULL, "ports ports/1 ports/2 ports/3");
    write_file("mlx5_0/ports/1/rate", "2.5 Gb/sec (1X SDR)\n");
    write_file("mlx5_0/ports/2/rate", "100 Gb/sec (4X EDR)\n");
    write_file("mlx5_0/ports/3/rate", "much\n");
    assert_true(tly_card_rdma_rate_of(folder, "mlx5_0") == 100000000000);
    assert_true(tly_card_rdma_rate_of(folder, "mlx5_1") == 0);
}

/* The first port has no cable: the second says what the card carries. */
static void cards_are_as_fast_as_their_fastest_port(void **state)
{
    make("0000:3b:00.0", NULL, "net net/eth4");
    write_file("0000:3b:00.0/net/eth4/speed", "-1\n");
    make("0000:3b:00.1", NULL, "net net/eth5 infiniband infiniband/mlx5_9");
    write_file("0000:3b:00.1/net/eth5/speed", "25000\n");
    assert_true(tly_card_device_rate_of(folder, "0000:3b:00.0") == 25000000000);
    make("0000:3b:00.1/infiniband/mlx5_9/ports", NULL, "1");
    write_file("0000:3b:00.1/infiniband/mlx5_9/ports/1/rate", "100 Gb/sec (4X EDR)\n");
    assert_true(tly_card_device_rate_of(folder, "0000:3b:00.0") == 100000000000);
    assert_true(tly_card_device_rate_of(folder, "0000:3c:00.0") == 0);
}

static void links_say_how_fast_they_could_be(void **state)
{
    static const struct {
        const char *name, *speed, *width;
        double rate;
    } cases[] = {{"0000:01:00.0", "8.0 GT/s PCIe\n", "16\n", 15.75e9},
                 {"0000:02:00.0", "2.5 GT/s PCIe\n", "1\n", 0.25e9},
                 {"0000:03:00.0", "32.0 GT/s PCIe\n", "16\n", 63.02e9},
                 {"0000:04:00.0", "Unknown\n", "255\n", 0},
                 {"0000:05:00.0", "16.0 GT/s PCIe\n", "255\n", 0},
                 {"0000:06:00.0", "-8\n", "16\n", 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char name[64];
        make(cases[i].name, NULL, "");
        snprintf(name, sizeof name, "%s/max_link_speed", cases[i].name);
        write_file(name, cases[i].speed);
        snprintf(name, sizeof name, "%s/max_link_width", cases[i].name);
        write_file(name, cases[i].width);
        double rate = tly_card_bus_rate_of(folder, cases[i].name);
        if (rate < cases[i].rate * 0.999 || rate > cases[i].rate * 1.001)
            fail_msg("%s: %g", cases[i].name, rate);
    }
    assert_true(tly_card_bus_rate_of(folder, "0000:07:00.0") == 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cards_say_their_speed),
        cmocka_unit_test(rdma_devices_say_their_speed),
        cmocka_unit_test(cards_are_as_fast_as_their_fastest_port),
        cmocka_unit_test(links_say_how_fast_they_could_be),
        cmocka_unit_test(loopback_and_foreign_addresses_are_unknown),
    };
    return cmocka_run_group_tests(tests, build, tear_down);
}
