/* machine_test.c - machines from hwloc's XML and lists of links: those of test/topo/machines, and files that lie, are cut
 * off, or are no machines at all. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include <hwloc.h>

#include "machine/xml.h"
#include "test/topo/machine_files.h"

#define GBIT (1e9 / 8)

static struct tly_machine m;
static char why[512];

static void load(const char *name)
{
    why[0] = '\0';
    if (load_machine(name, &m, why, sizeof why) != 0)
        fail_msg("%s: %s", name, why);
}

static bool noted(const char *piece)
{
    for (int i = 0; i < m.notes; i++)
        if (strstr(m.note[i], piece))
            return true;
    return false;
}

/* --- the machines of the tests -------------------------------------------------------------------------------- */

static void counts(void **state)
{
    static const struct {
        const char *name;
        int nodes, switches, gpus, cards;
    } cases[] = {{"pcie", 2, 2, 8, 1},    {"nvlink", 2, 4, 8, 1}, {"dgx1", 2, 4, 8, 4},
                 {"hgx", 2, 8, 8, 9},     {"ports", 2, 0, 8, 1},  {"workstation", 1, 0, 4, 1},
                 {"virtual", 1, 0, 8, 1}, {"one", 1, 0, 1, 1},    {"mig", 2, 2, 10, 1},
                 {"none", 2, 0, 0, 1},    {"uneven", 2, 2, 8, 1}, {"nested", 2, 6, 8, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        load(cases[i].name);
        if (m.nodes != cases[i].nodes || m.switches != cases[i].switches || m.gpus != cases[i].gpus ||
            m.cards != cases[i].cards)
            fail_msg("%s: %d nodes, %d switches, %d GPUs, %d cards", cases[i].name, m.nodes, m.switches,
                     m.gpus, m.cards);
    }
}

static void the_tree(void **state)
{
    load("pcie");
    assert_true(m.node[0].cores == 8 && m.node[1].cores == 8 && m.node[1].memory == 192ULL << 30);
    for (int g = 0; g < 8; g++) {
        assert_int_equal(m.gpu[g].parent, g / 4);
        assert_int_equal(m.gpu[g].node, g / 4);
        assert_true(m.gpu[g].link.bytes == 105 * GBIT && m.gpu[g].link.source == TLY_GIVEN);
    }
    assert_true(m.card[0].parent == -1 && m.card[0].node == 0 && m.card[0].rate.bytes == 100 * GBIT);
    assert_string_equal(m.card[0].name, "eth0");
    assert_string_equal(m.card[0].rdma, "mlx5_0");
    assert_true(m.across.bytes == 80 * GBIT && m.socket.bytes == 300 * GBIT);
    load("nvlink");
    assert_int_equal(m.card[0].parent, m.gpu[0].parent);
    assert_true(m.nvlink[0][3] == 400 * GBIT && m.nvlink[0][1] == 200 * GBIT && m.nvlink[0][5] == 0);
    for (int a = 0; a < 8; a++) { /* 1.2 Tbit/s each */
        double sum = 0;
        for (int b = 0; b < 8; b++)
            sum += m.nvlink[a][b];
        assert_true(sum == 1200 * GBIT);
    }
    load("nested");
    assert_true(m.sw[m.gpu[0].parent].parent >= 0 && m.sw[m.sw[m.gpu[0].parent].parent].parent == -1);
    assert_true(m.card[0].parent == m.sw[m.gpu[7].parent].parent);
}

static void what_is_found_and_what_is_guessed(void **state)
{
    load("ports");
    assert_true(m.gpu[0].link.source == TLY_FOUND && m.across.source == TLY_GUESSED);
    assert_true(m.gpu[0].link.bytes > 26.2e9 && m.gpu[0].link.bytes < 26.3e9); /* 83.3% of 31.5 GB/s */
    assert_true(noted("83%") && noted("no GPUs share a PCIe switch"));
    load("virtual");
    assert_true(m.gpu[3].link.source == TLY_GUESSED && m.card[0].rate.source == TLY_UNKNOWN);
    assert_true(noted("9 PCIe links do not say their speed") && noted("ens5 does not say its rate"));
    load("hgx");
    assert_int_equal(m.nvswitches, 4);
    assert_true(m.gpu[0].nvswitch.bytes == 3600 * GBIT);
    for (int c = 0; c < m.cards; c++)
        assert_true(m.card[c].idle == (strcmp(m.card[c].name, "eno1") == 0));
    assert_int_equal(m.card[tly_machine_card(&m, "eno1")].ports, 2);
    load("none");
    assert_int_equal(m.card[0].ports, 2);
}

static void slices(void **state)
{
    load("mig");
    assert_true(m.sw[0].gpu && m.sw[1].gpu && m.sw[0].node == 0 && m.sw[1].node == 1);
    for (int g = 0; g < 10; g++) {
        assert_int_equal(m.gpu[g].parent, g < 7 ? 0 : 1);
        assert_int_equal(m.gpu[g].slice, g < 7 ? g : g - 7);
        assert_true(m.gpu[g].peers == 0 && m.gpu[g].link.bytes == 0);
    }
    assert_true(m.sw[0].up.bytes > 26e9);
}

/* They are XML that hwloc takes, with as many GPUs and cards by its own count. */
static void hwloc_reads_them_too(void **state)
{
    static const char *const names[] = {"pcie",    "nvlink", "dgx1", "hgx",  "ports",  "workstation",
                                        "virtual", "one",    "mig",  "none", "uneven", "nested"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        size_t length;
        char *xml = machine_file(names[i], "xml", &length);
        hwloc_topology_t t;
        int devices = 0;
        assert_non_null(xml);
        assert_int_equal(hwloc_topology_init(&t), 0);
        assert_int_equal(hwloc_topology_set_io_types_filter(t, HWLOC_TYPE_FILTER_KEEP_ALL), 0);
        assert_int_equal(hwloc_topology_set_xmlbuffer(t, xml, (int)length + 1), 0);
        assert_int_equal(hwloc_topology_load(t), 0);
        for (hwloc_obj_t o = NULL; (o = hwloc_get_next_pcidev(t, o));)
            devices += o->attr->pcidev.class_id >> 8 == 3 ||
                       (o->attr->pcidev.class_id >> 8 == 2 && !o->attr->pcidev.func);
        hwloc_topology_destroy(t);
        assert_int_equal(tly_machine_read(xml, length, NULL, &m, why, sizeof why), 0);
        assert_int_equal(devices, m.gpus + m.cards);
        free(xml);
    }
}

static void memory_that_says_its_bandwidth(void **state)
{
    static const char xml[] =
        "<topology version='2.0'><object type='Machine'><object type='Package'>"
        "<object type='NUMANode' os_index='3' gp_index='7' local_memory='1000'/></object></object>"
        "<memattr name='Latency' flags='6'><memattr_value target_obj_gp_index='7' value='9'/></memattr>"
        "<memattr name='Bandwidth' flags='5'><memattr_value target_obj_gp_index='7' value='1024'/></memattr>"
        "<memattr name='Other'><memattr_value target_obj_gp_index='7' value='99999'/></memattr></topology>";
    assert_int_equal(tly_machine_read(xml, strlen(xml), NULL, &m, why, sizeof why), 0);
    assert_int_equal(m.nodes, 1);
    assert_true(m.node[0].number == 3 && m.node[0].memory == 1000 &&
                m.node[0].bandwidth.bytes == (double)(1 << 30));
}

static double look(const char *address)
{
    return strcmp(address, "0000:01:00.0") == 0 ? 31.5e9 : 0;
}

/* hwloc shows what a link carries now; what it can carry counts. */
static void a_link_that_sleeps(void **state)
{
    static const char xml[] =
        "<topology version='2.0'><object type='Machine'><object type='NUMANode'/><object type='Bridge' "
        "bridge_type='0-1'>"
        "<object type='PCIDev' pci_busid='0000:01:00.0' pci_type='0302 [10de:1]' "
        "pci_link_speed='4.0'/></object>"
        "</object></topology>";
    assert_int_equal(tly_machine_read(xml, strlen(xml), NULL, &m, why, sizeof why), 0);
    assert_int_equal(tly_machine_finish(&m, why, sizeof why), 0);
    assert_true(m.gpu[0].link.bytes < 3.4e9 && noted("idle GPU"));
    assert_int_equal(tly_machine_read(xml, strlen(xml), look, &m, why, sizeof why), 0);
    assert_int_equal(tly_machine_finish(&m, why, sizeof why), 0);
    assert_true(m.gpu[0].link.bytes > 26e9 && !noted("idle GPU"));
}

/* GPUs are numbered along the bus, though the second node's come first on it. */
static void numbers_follow_the_bus(void **state)
{
    static const char xml[] =
        "<topology version='2.0'><object type='Machine'>"
        "<object type='Package'><object type='NUMANode' os_index='0'/><object type='Bridge' "
        "bridge_type='0-1'>"
        "<object type='PCIDev' pci_busid='10000:01:00.0' pci_type='0302 [10de:1]'/>"
        "<object type='PCIDev' pci_busid='0000:81:00.0' pci_type='0302 [10de:1]'/></object></object>"
        "<object type='Package'><object type='NUMANode' os_index='1'/><object type='Bridge' "
        "bridge_type='0-1'>"
        "<object type='PCIDev' pci_busid='0000:07:00.0' pci_type='0302 [10de:1]'/></object></object>"
        "</object></topology>";
    assert_int_equal(tly_machine_read(xml, strlen(xml), NULL, &m, why, sizeof why), 0);
    assert_string_equal(m.gpu[0].address, "0000:07:00.0");
    assert_string_equal(m.gpu[1].address, "0000:81:00.0");
    assert_string_equal(m.gpu[2].address, "10000:01:00.0");
    assert_true(m.gpu[0].node == 1 && m.gpu[1].node == 0 && m.gpu[2].node == 0);
}

/* A file that has been edited may have a card beside the machine instead of in it. */
static void a_card_that_nothing_is_above(void **state)
{
    static const char xml[] =
        "<topology version='2.0'><object type='Machine'><object type='NUMANode'/></object>"
        "<object type='PCIDev' pci_busid='0000:01:00.0' pci_type='0200 [1:1]'/>"
        "<object type='PCIDev' pci_busid='0000:01:00.1' pci_type='0200 [1:1]'/></topology>";
    assert_int_equal(tly_machine_read(xml, strlen(xml), NULL, &m, why, sizeof why), 0);
    assert_int_equal(m.cards, 2);
    assert_string_equal(m.card[0].address, "0000:01:00.0");
}

/* --- XML that is none ------------------------------------------------------------------------------------------ */

#define TOP "<topology version=\"2.0\"><object type=\"Machine\">"

static void xml_that_lies(void **state)
{
    static const struct {
        const char *xml, *piece;
    } cases[] = {
        {"", "no machine in it"},
        {"hello", "no machine in it"},
        {"<html>", "does not begin with <topology>"},
        {"<topology><object/></topology>", "its version is not given"},
        {"<topology version=\"1.0\"/>", "its version is 1.0"},
        {"<topology version=\"2.0\"/>", "no machine in it"},
        {"<topology version=\"2.0\"><object type=\"Foo\"/></topology>", "no machine in it"},
        {"<topology version=\"2.0\"><object/></topology>", "no machine in it"},
        {"<topology version=\"2.0\"><object type=\"Foo\"><object type=\"Machine\"/></object></topology>",
         "no machine in it"},
        {"<topology version=\"2.0\">", "ends before all its elements do"},
        {TOP, "ends before all its elements do"},
        {TOP "</topology>", "closes an element that is not open"},
        {TOP "\n\n<object type=\"Core", "line 3: the file ends within a tag"},
        {TOP "<object type=Core/>", "not in quotes"},
        {TOP "<object type/>", "has no value"},
        {TOP "<object type=\"a\" type=\"b\"/>", "the same attribute twice"},
        {TOP "<object a=\"<\"/>", "holds a \"<\""},
        {TOP "<>", "not well-formed"},
        {TOP "<object = \"\">", "not well-formed"},
        {TOP "<!-- ", "within a comment"},
        {"<!DOCTYPE topology [<!ENTITY a \"b\">]>", "declarations of its own"},
        {TOP "<![CDATA[", "not well-formed"},
        {TOP "<object type=\"PCIDev\"/>", "no PCI address such as 0000:3b:00.0, but none"},
        {TOP "<object type=\"PCIDev\" pci_busid=\"0:0:0.0\" pci_link_speed=\"\"/>",
         "such as 15.75, but none"},
        {TOP "<object type=\"PCIDev\" pci_busid=\"a:b\"/>", "no PCI address such as 0000:3b:00.0, but a:b"},
        {TOP "<object type=\"PCIDev\" pci_busid=\"0:0:0.0\" pci_link_speed=\"-1\"/>", "no speed"},
        {TOP "<object type=\"PCIDev\" pci_busid=\"0:0:0.0\" pci_link_speed=\"nan\"/>", "no speed"},
        {TOP "<object type=\"PCIDev\" pci_busid=\"0:0:0.0\" pci_link_speed=\"9999999999999\"/>", "no speed"},
        /* A tree that closes to a ring: a switch below itself. */
        {TOP "<object type=\"Bridge\" pci_busid=\"0000:01:00.0\"><object type=\"Bridge\" "
             "pci_busid=\"0000:01:00.0\"/>"
             "</object></object></topology>",
         "two devices have the PCI address 0000:01:00.0"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int err = tly_machine_read(cases[i].xml, strlen(cases[i].xml), NULL, &m, why, sizeof why);
        if (err != -EINVAL || !strstr(why, cases[i].piece))
            fail_msg("%s: %d, %s", cases[i].xml, err, why);
    }
}

/* Cut off anywhere, a file is refused with a sentence, and is never a smaller machine. */
static void xml_that_is_cut_off(void **state)
{
    size_t length;
    char *xml = machine_file("nvlink", "xml", &length);
    size_t end = (size_t)(strstr(xml, "</topology>") - xml) + strlen("</topology>");
    for (size_t n = 0; n < end; n += 1 + n % 7) {
        char *copy = malloc(n + 1); /* exactly so long, for the sanitizer */
        memcpy(copy, xml, n);
        assert_int_equal(tly_machine_read(copy, n, NULL, &m, why, sizeof why), -EINVAL);
        assert_true(strlen(why) > 10);
        free(copy);
    }
    free(xml);
}

static void too_much_of_it(void **state)
{
    size_t room = 0, length;
    char *text = NULL;
    FILE *f = open_memstream(&text, &room);
    fputs(TOP, f);
    for (int i = 0; i < 65; i++)
        fprintf(f, "<object type='PCIDev' pci_busid='0000:%02x:00.0' pci_type='0302 [10de:1]'/>", i);
    fputs("</object></topology>", f);
    fclose(f);
    length = strlen(text);
    assert_int_equal(tly_machine_read(text, length, NULL, &m, why, sizeof why), -E2BIG);
    assert_non_null(strstr(why, "more than 64 GPUs"));
    memcpy(strstr(text, "10de"), "1a03", 4); /* one is the board's own, for a screen */
    assert_int_equal(tly_machine_read(text, length, NULL, &m, why, sizeof why), 0);
    assert_int_equal(m.gpus, 64);
    free(text);
    f = open_memstream(&text, &room);
    fputs("<topology version='2.0'>", f);
    for (int i = 0; i < 100; i++)
        fputs("<object type='Group'>", f);
    fclose(f);
    assert_int_equal(tly_machine_read(text, strlen(text), NULL, &m, why, sizeof why), -EINVAL);
    assert_non_null(strstr(why, "nested more than 64 deep"));
    free(text);
    f = open_memstream(&text, &room);
    fputs(TOP, f);
    for (int i = 0; i < 33; i++)
        fputs("<object type='NUMANode'/>", f);
    fputs("</object></topology>", f);
    fclose(f);
    assert_int_equal(tly_machine_read(text, strlen(text), NULL, &m, why, sizeof why), -E2BIG);
    free(text);
}

/* Names go to terminals, JSON and SVG. */
static void names_with_odd_characters(void **state)
{
    static const char xml[] = TOP
        "<object type='NUMANode'/><object type='PCIDev' pci_busid='0000:01:00.0' pci_type='0302 [10de:1]'>"
        "<info name='PCIDevice' value='a&lt;b&amp;&quot;&#27;[31m\x1b\xff&apos;&broken;'/></object>"
        "<object type='PCIDev' pci_busid='0000:02:00.0' pci_type='0200 [1:1]'>"
        "<object type='OSDev' osdev_type='2' name='a very long name of an interface indeed'/></object>"
        "</object></topology>";
    assert_int_equal(tly_machine_read(xml, strlen(xml), NULL, &m, why, sizeof why), 0);
    assert_string_equal(m.gpu[0].name, "a<b&\"?[31m?"
                                       "?'&broken;");
    assert_int_equal(strlen(m.card[0].name), sizeof m.card[0].name - 1);
}

/* --- lists of links ---------------------------------------------------------------------------------------------- */

static int links(const char *text)
{
    why[0] = '\0';
    return tly_machine_links(text, strlen(text), &m, why, sizeof why);
}

static void lists_that_are_wrong(void **state)
{
    static const struct {
        const char *line, *piece;
    } cases[] = {
        {"nvlink gpu0 gpu1", "should be \"nvlink GPU GPU RATE\""},
        {"nvlink gpu0 gpu9 25G", "\"gpu9\" is no GPU"},
        {"nvlink gpu0 gpu0 25G", "linked to itself"},
        {"nvlink gpu0 gpu1 25G\nnvlink gpu1 gpu0 25G", "line 2: \"gpu0\" is linked to it already"},
        {"nvlink gpu0 gpu1 0", "is no rate"},
        {"nvlink gpu0 gpu1 -5G", "is no rate"},
        {"nvlink gpu0 gpu1 1e9", "is no rate"},
        {"nvlink gpu0 gpu1 inf", "is no rate"},
        {"nvlink gpu0 gpu1 25GG", "is no rate"},
        {"nvlink gpu0 gpu1 999999999T", "is no rate"},
        {"nvswitch everybody 25G", "\"everybody\" is no GPU"},
        {"pcie wlan0 25G", "is no GPU, switch or card"},
        {"card eth9 25G", "is no network card"},
        {"memory 7 25G", "is no NUMA node"},
        {"memory x 25G", "is no number"},
        {"slices gpu0 9", "from 1 to 8"},
        {"slices gpu0 0", "from 1 to 8"},
        {"socket", "should be \"socket RATE\""},
        {"across fast", "is no rate"},
        {"peers maybe", "neither on nor off"},
        {"gpu gpu0 1 2 3", "a word too many"},
        {"fly gpu0", "is none of nvlink"},
        {"\n\n# fine\nfly", "line 4"},
        {"fly \x1b[31m", "is none of"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        load("pcie");
        if (links(cases[i].line) != -EINVAL || !strstr(why, cases[i].piece) || strchr(why, '\x1b'))
            fail_msg("%s: %s", cases[i].line, why);
    }
    char longest[400];
    memset(longest, 'a', sizeof longest);
    longest[sizeof longest - 1] = '\0';
    assert_int_equal(links(longest), -EINVAL);
    assert_int_equal(tly_machine_links("peers\0off", 9, &m, why, sizeof why), -EINVAL);
}

static void lists_that_are_right(void **state)
{
    load("pcie");
    assert_int_equal(
        links("nvlink gpu0 0000:04:00.0 200G # by its address\r\n\n pcie gpu2 50G\npcie switches 60G\n"
              "pcie mlx5_0 70g\ncard 0000:09:00.0 25000M\nmemory 1 800G\nsocket 1T\npeers off"),
        -EINVAL); /* the card is elsewhere */
    char text[200];
    snprintf(text, sizeof text,
             "nvlink gpu0 %s 200G # by its address\r\n\n pcie gpu2 50G\npcie switches 60G\npcie mlx5_0 70g\n"
             "card %s 25000M\nmemory 1 800G\nsocket 1T\npeers off",
             m.gpu[1].address, m.card[0].address);
    load("pcie");
    assert_int_equal(links(text), 0);
    assert_true(m.nvlink[0][1] == 200 * GBIT && m.nvlink[1][0] == 200 * GBIT);
    assert_true(m.gpu[2].link.bytes == 50 * GBIT && m.gpu[1].link.bytes == 105 * GBIT);
    assert_true(m.sw[1].up.bytes == 60 * GBIT && m.card[0].link.bytes == 70 * GBIT);
    assert_true(m.card[0].rate.bytes == 25 * GBIT && m.node[1].bandwidth.bytes == 800 * GBIT);
    assert_true(m.node[0].bandwidth.bytes == 0 && m.socket.bytes == 1000 * GBIT && m.peers_off);
    assert_int_equal(tly_machine_links("", 0, &m, why, sizeof why), 0);
}

/* Slices push what is behind them up, with its NVLinks; those of the GPU itself go. */
static void slices_among_others(void **state)
{
    load("nvlink");
    double before = m.nvlink[0][3];
    assert_int_equal(links("slices gpu1 3"), 0);
    assert_int_equal(tly_machine_finish(&m, why, sizeof why), 0);
    assert_true(m.gpus == 10 && m.gpu[1].slice == 0 && m.gpu[3].slice == 2 && m.gpu[4].slice == -1);
    assert_true(m.nvlink[0][5] == before && m.nvlink[5][0] == before);
    for (int g = 0; g < 10; g++)
        for (int s = 1; s < 4; s++)
            assert_true(m.nvlink[g][s] == 0 && m.nvlink[s][g] == 0);
    load("hgx");
    for (int i = 0; i < 8; i++)
        m.gpu[i].slices = 8;
    assert_int_equal(tly_machine_finish(&m, why, sizeof why), 0);
    assert_int_equal(m.gpus, 64);
    m.gpu[0].slices = 2;
    assert_int_equal(tly_machine_finish(&m, why, sizeof why), -E2BIG);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(counts),
        cmocka_unit_test(the_tree),
        cmocka_unit_test(what_is_found_and_what_is_guessed),
        cmocka_unit_test(slices),
        cmocka_unit_test(hwloc_reads_them_too),
        cmocka_unit_test(memory_that_says_its_bandwidth),
        cmocka_unit_test(a_link_that_sleeps),
        cmocka_unit_test(numbers_follow_the_bus),
        cmocka_unit_test(a_card_that_nothing_is_above),
        cmocka_unit_test(xml_that_lies),
        cmocka_unit_test(xml_that_is_cut_off),
        cmocka_unit_test(too_much_of_it),
        cmocka_unit_test(names_with_odd_characters),
        cmocka_unit_test(lists_that_are_wrong),
        cmocka_unit_test(lists_that_are_right),
        cmocka_unit_test(slices_among_others),
    };
    return cmocka_run_group_tests_name("machine", tests, NULL, NULL);
}
