/* nvml_test.c - what NVIDIA's management library says, by one that stands in for it (fake_nvml.c). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "inside/inside.h"
#include "test/topo/machine_files.h"

#define GBIT (1e9 / 8)

static struct tly_machine m, whole;

static bool noted(const char *piece)
{
    for (int i = 0; i < m.notes; i++)
        if (strstr(m.note[i], piece))
            return true;
    return false;
}

/* The NVLink machine without its list of links, and a library that knows its GPUs and says `more`. */
static void ask(const char *name, const char *more)
{
    char why[256], list[2048] = "";
    size_t length;
    char *xml = machine_file(name, "xml", &length);
    assert_non_null(xml);
    assert_int_equal(tly_machine_read(xml, length, NULL, &m, why, sizeof why), 0);
    free(xml);
    for (int i = 0; i < m.gpus; i++)
        snprintf(list + strlen(list), sizeof list - strlen(list), "gpu=%s ", m.gpu[i].address);
    snprintf(list + strlen(list), sizeof list - strlen(list), "%s", more);
    setenv("FAKE_NVML", list, 1);
    tly_machine_nvml(&m, getenv("FAKE_LIBRARY"));
}

static void finish(void)
{
    char why[256];
    assert_int_equal(tly_machine_finish(&m, why, sizeof why), 0);
}

#define CUBE \
    "link=0:1:1 link=0:2:1 link=0:3:2 link=0:4:2 link=1:2:2 link=1:3:1 link=1:5:2 link=2:3:2 link=2:6:1 " \
    "link=3:7:1 link=4:5:1 link=4:6:1 link=4:7:2 link=5:6:2 link=5:7:1 link=6:7:2 "

static void nvlinks(void **state)
{
    char why[256];
    ask("nvlink", CUBE "speed=25000");
    assert_int_equal(load_machine("nvlink", &whole, why, sizeof why), 0);
    assert_int_equal(m.gpus, 8);
    for (int a = 0; a < 8; a++) /* the same as the list says */
        for (int b = 0; b < 8; b++)
            assert_true(m.nvlink[a][b] == whole.nvlink[a][b]);
    assert_int_equal(m.nvlink_source, TLY_FOUND);
    assert_string_equal(m.gpu[0].name, "Fake GPU");
    assert_true(m.gpu[7].memory == 80ULL << 30 && m.notes == 0);
}

static void nvswitches(void **state)
{
    ask("hgx",
        "switch=0:18 switch=1:18 switch=2:18 switch=3:18 switch=4:18 switch=5:18 switch=6:18 switch=7:17");
    for (int i = 0; i < 8; i++)
        assert_true(m.gpu[i].nvswitch.bytes == (i == 7 ? 17 : 18) * 200 * GBIT);
    assert_true(noted("does not say what an NVLink carries"));
}

static void slices(void **state)
{
    ask("ports", "mig=1:3 mig=4:7");
    finish();
    assert_int_equal(m.gpus, 16);
    assert_true(m.gpu[1].slice == 0 && m.gpu[4].slice == -1 && m.gpu[6].slice == 0);
    ask("ports", "mig=1:0 nopeers");
    assert_false(noted("MIG"));
}

static void no_copies_between_gpus(void **state)
{
    struct tly_inside plan;
    struct tly_inside_job job = {.bytes = 1000000, .traffic = 1.75};
    ask("pcie", "nopeers");
    assert_true(m.peers_off && noted("cannot copy to one another"));
    finish();
    assert_int_equal(tly_inside_plan(&m, &job, TLY_MAY_ALL, &plan), 0);
    assert_int_equal(plan.way.base, TLY_GROUP_SINGLE);
    tly_inside_finish(&plan);
    ask("pcie", "");
    assert_false(m.peers_off);
}

/* As in containers that hide the bus. */
static void gpus_that_the_bus_does_not_show(void **state)
{
    ask("none", "gpu=0000:41:00.0 gpu=0000:42:00.0 link=0:1:4 speed=14000");
    finish();
    assert_int_equal(m.gpus, 2);
    assert_true(m.nvlink[0][1] == 56e9 && m.gpu[1].link.source == TLY_GUESSED);
    assert_true(noted("not visible on the bus"));
}

static void failures(void **state)
{
    static const struct {
        const char *list, *piece;
    } cases[] = {
        {"fail=start", "does not start: Driver Not Loaded"},
        {"fail=count", "does not say how many GPUs there are: GPU is lost"},
        {"fail=pci:5 " CUBE, "fails at GPU 5: GPU is lost"},
        {"fail=state:2 " CUBE, "fails at the NVLinks of GPU 2: GPU is lost"},
        {"fail=remote:0 " CUBE, "fails at the NVLinks of GPU 0"},
        {"fail=remote " CUBE, "fails at the NVLinks of GPU 7"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ask("nvlink", cases[i].list);
        assert_int_equal(m.gpus, 8); /* the bus still shows them */
        if (!noted(cases[i].piece))
            fail_msg("%s: %s", cases[i].list, m.notes ? m.note[0] : "no note");
        finish();
    }
    ask("nvlink",
        "fail=pci:5 " CUBE "speed=25000"); /* what was said before it stays, also of the other end */
    assert_true(m.nvlink[0][4] == 400 * GBIT && m.nvlink[5][1] == 400 * GBIT && m.nvlink[6][7] == 0);
    ask("nvlink", "fail=state:2 " CUBE "speed=25000");
    assert_true(m.nvlink[2][3] == 400 * GBIT);
}

static void no_library(void **state)
{
    ask("nvlink", "");
    m.notes = 0;
    tly_machine_nvml(&m, "libno-such-library.so.1");
    assert_true(noted("there is no libno-such-library.so.1"));
    m.notes = 0;
    tly_machine_nvml(&m, "libm.so.6");
    assert_true(noted("libm.so.6 is not NVIDIA's"));
    m.notes = m.gpus = 0; /* a machine without GPUs needs none */
    tly_machine_nvml(&m, "libno-such-library.so.1");
    assert_int_equal(m.notes, 0);
}

static void odd_names_and_many_gpus(void **state)
{
    char list[4096] = "odd ";
    ask("nvlink", "odd");
    assert_null(strchr(m.gpu[0].name, '\033'));
    assert_int_equal(strlen(m.gpu[0].name), sizeof m.gpu[0].name - 1);
    for (int i = 0; i < 64; i++)
        snprintf(list + strlen(list), sizeof list - strlen(list), "gpu=0000:%02x:01.0 ", i);
    ask("none", list);
    finish();
    assert_int_equal(m.gpus, 64);
    assert_int_equal(m.notes, TLY_MAX_NOTES);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nvlinks),
        cmocka_unit_test(nvswitches),
        cmocka_unit_test(slices),
        cmocka_unit_test(no_copies_between_gpus),
        cmocka_unit_test(gpus_that_the_bus_does_not_show),
        cmocka_unit_test(failures),
        cmocka_unit_test(no_library),
        cmocka_unit_test(odd_names_and_many_gpus),
    };
    return cmocka_run_group_tests_name("nvml", tests, NULL, NULL);
}
