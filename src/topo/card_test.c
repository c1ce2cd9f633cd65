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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cards_say_their_speed),
        cmocka_unit_test(loopback_and_foreign_addresses_are_unknown),
    };
    return cmocka_run_group_tests(tests, build, tear_down);
}
