/* param_test.c - settings: precedence, forms of values, refusals and their sentences, the digest, the lists. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/param.h"

extern char **environ;
static char why[1024];
static char path[] = "/tmp/tally-param-test-XXXXXX";

static int load(struct tly_params *p, const char *a, const char *b)
{
    const char *settings[] = {a, b, NULL};
    strcpy(why, "untouched");
    return tly_params_load(p, settings, why, sizeof why);
}

static int fresh(void **state)
{
    for (;;) { /* whatever TALLY_* the tests themselves run under */
        char **e = environ, name[128];
        while (*e && strncmp(*e, "TALLY_", 6) != 0)
            e++;
        if (!*e)
            return 0;
        snprintf(name, sizeof name, "%.*s", (int)strcspn(*e, "="), *e);
        unsetenv(name);
    }
}

static void write_config(const char *text, mode_t mode)
{
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
    chmod(path, mode);
}

/* The load is refused with a sentence that contains each of the pieces, and p stays as it was. */
static void refused(const char *setting, const char *piece, const char *piece2)
{
    struct tly_params p = {.port = 4711};
    assert_int_equal(load(&p, setting, NULL), -EINVAL);
    if (!strstr(why, piece) || (piece2 && !strstr(why, piece2)))
        fail_msg("%s: \"%s\"", setting, why);
    assert_int_equal(p.port, 4711);
    assert_null(p.log);
}

static void defaults(void **state)
{
    struct tly_params p;
    assert_int_equal(tly_params_load(&p, NULL, NULL, 0), 0);
    assert_int_equal(p.port, 29777);
    assert_int_equal(p.part_bytes, 0);
    assert_true(p.join_timeout == 600);
    assert_string_equal(p.log, "info");
    assert_null(p.coord);
    tly_params_finish(&p);
    assert_null(p.log);
    tly_params_finish(&p);
    tly_params_finish(NULL);
}

static void precedence(void **state)
{
    struct tly_params p;
    write_config(
        "# a comment\n\n  TALLY_PORT = 1000 \nTALLY_SERVERS=1\r\nTALLY_JOB=from file\nTALLY_IFACE=eth0\n",
        0644);
    setenv("TALLY_CONFIG", path, 1);
    setenv("TALLY_PORT", "2000", 1);
    setenv("TALLY_SERVERS", "2", 1);
    setenv("TALLY_IFACE", "", 1);
    assert_int_equal(load(&p, "TALLY_PORT=3000", NULL), 0);
    assert_int_equal(p.port, 3000);
    assert_int_equal(p.servers, 2);
    assert_string_equal(p.job, "from file");
    assert_null(p.iface); /* empty stands for the default */
    tly_params_finish(&p);
}

static void config_named_by_a_setting_wins(void **state)
{
    char setting[128];
    struct tly_params p;
    write_config("TALLY_PORT=1000\n", 0644);
    setenv("TALLY_CONFIG", "/nonexistent/tally.conf", 1);
    snprintf(setting, sizeof setting, "TALLY_CONFIG=%s", path);
    assert_int_equal(load(&p, setting, NULL), 0);
    assert_int_equal(p.port, 1000);
    assert_string_equal(p.config, path);
    tly_params_finish(&p);
    assert_int_equal(load(&p, NULL, NULL), -ENOENT);
    assert_non_null(strstr(why, "/nonexistent/tally.conf"));
}

static void config_errors_name_the_line(void **state)
{
    setenv("TALLY_CONFIG", path, 1);
    write_config("TALLY_PORT=1000\nTALLY_PART_BYTE=1\n", 0644);
    refused(NULL, ", line 2: unknown setting TALLY_PART_BYTE;", "did you mean TALLY_PART_BYTES?");
    write_config("\n\nport 1000\n", 0644);
    refused(NULL, ", line 3: ", "NAME=value");
    write_config("PORT=1000\n", 0644);
    refused(NULL, "did you mean TALLY_PORT?", NULL);
    write_config("TALLY_CONFIG=other\n", 0644);
    refused(NULL, "cannot name another", NULL);
    write_config("TALLY_SECRET=0123456789abcdef\n", 0644);
    refused(NULL, "chmod 600", path);
    struct tly_params p;
    write_config("TALLY_SECRET=0123456789abcdef\n", 0600);
    assert_int_equal(load(&p, NULL, NULL), 0);
    assert_string_equal(p.secret, "0123456789abcdef");
    tly_params_finish(&p);
}

static void sizes(void **state)
{
    static const struct {
        const char *text;
        uint64_t bytes;
    } good[] = {{"0", 0},         {"123", 123},      {"64K", 64 << 10},  {"64k", 64 << 10},  {"3M", 3 << 20},
                {"3MB", 3 << 20}, {"2MiB", 2 << 20}, {"5G", 5ull << 30}, {"1T", 1ull << 40}, {"100B", 100}};
    struct tly_params p;
    char setting[64];
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        snprintf(setting, sizeof setting, "TALLY_MEMORY=%s", good[i].text);
        assert_int_equal(load(&p, setting, NULL), 0);
        assert_true(p.memory == good[i].bytes);
        tly_params_finish(&p);
    }
    static const char *const bad[] = {"-1", "1.5M", "M", "1X", "1MM", "1Mi", " 1", "1 ", "0x10", "all"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        snprintf(setting, sizeof setting, "TALLY_MEMORY=%s", bad[i]);
        refused(setting, setting, "is no size");
    }
    refused("TALLY_MEMORY=99999999999999999999", "out of range", "0 to 1024T");
    refused("TALLY_MEMORY=18446744073709551615T", "out of range", NULL);
}

__attribute__((noinline)) static char *printed(const struct tly_params *p, enum tly_params_format format)
{
    char *text = NULL;
    size_t len;
    FILE *f = open_memstream(&text, &len);
    tly_params_print(f, p, format);
    fclose(f);
    return text;
}

static void rates(void **state)
{
    static const struct {
        const char *text;
        uint64_t bits;
    } good[] = {{"1000", 1000},          {"64k", 64000},          {"100M", 100000000},
                {"2.5G", 2500000000ull}, {"25g", 25000000000ull}, {"0.1T", 100000000000ull}};
    struct tly_params p;
    char setting[64], text[32] = "";
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        snprintf(setting, sizeof setting, "TALLY_BANDWIDTH=%s", good[i].text);
        assert_int_equal(load(&p, setting, NULL), 0);
        assert_true(p.bandwidth == good[i].bits);
        tly_params_finish(&p);
    }
    refused("TALLY_BANDWIDTH=0", "TALLY_BANDWIDTH=0 is out of range: 1k to 1000T bit/s", NULL);
    refused("TALLY_BANDWIDTH=0.5G5", "TALLY_BANDWIDTH=0.5G5 is no rate", NULL);
    static const char *const bad[] = {"-1", "G", "fast", "10Gbit", "1e9", " 1G", "inf", "nan", "."};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        snprintf(setting, sizeof setting, "TALLY_SUM_RATE=%s", bad[i]);
        refused(setting, setting, "is no rate: 1k to 1000T bit/s");
    }
    refused("TALLY_BANDWIDTH=99999999999999999999T", "out of range", NULL);
    assert_int_equal(load(&p, NULL, NULL), 0); /* unset, and so it is shown */
    assert_true(p.bandwidth == 0 && p.sum_rate == 0);
    tly_params_finish(&p);
    assert_int_equal(load(&p, "TALLY_BANDWIDTH=2500M", NULL), 0);
    char *json = printed(&p, TLY_PARAMS_JSON), *table = printed(&p, TLY_PARAMS_TABLE);
    assert_non_null(strstr(json, "\"value\": 2500000000,"));
    assert_non_null(strstr(json, "\"bits_per_s\", \"default\": null, \"min\": 1000,"));
    char *line = strstr(table, "TALLY_BANDWIDTH");
    assert_non_null(line);
    sscanf(line, "%*s %31s", text);
    assert_string_equal(text, "2500M");
    sscanf(strstr(table, "TALLY_SUM_RATE"), "%*s %31s", text);
    assert_string_equal(text, "-");
    free(json);
    free(table);
    tly_params_finish(&p);
}

static void times(void **state)
{
    struct tly_params p;
    assert_int_equal(load(&p, "TALLY_LATE_WARNING=0.25", "TALLY_TIMEOUT=0"), 0);
    assert_true(p.late_warning == 0.25 && p.timeout == 0);
    tly_params_finish(&p);
    refused("TALLY_JOIN_TIMEOUT=inf", "is no time", "1 to 86400 seconds");
    refused("TALLY_JOIN_TIMEOUT=nan", "is no time", NULL);
    refused("TALLY_JOIN_TIMEOUT=1e3", "is no time", NULL);
    refused("TALLY_JOIN_TIMEOUT=0.5", "out of range", NULL);
}

static void ranges_and_multiples(void **state)
{
    struct tly_params p;
    refused("TALLY_PORT=0", "TALLY_PORT=0 is out of range: 1 to 65535", NULL);
    refused("TALLY_PORT=65536", "out of range", NULL);
    refused("TALLY_PORT=80x", "is no number", NULL);
    refused("TALLY_PORT=-1", "TALLY_PORT=-1 is out of range: 1 to 65535", NULL);
    refused("TALLY_SUM_THREADS=-2", "out of range: -1 to 1024", NULL);
    refused("TALLY_SUM_THREADS=--1", "is no number", NULL);
    assert_int_equal(load(&p, "TALLY_SUM_THREADS=-1", NULL), 0);
    assert_int_equal(p.sum_threads, -1);
    tly_params_finish(&p);
    refused("TALLY_PART_BYTES=5000", "4K to 64M, a multiple of 64", NULL);
    refused("TALLY_FRAGMENT_BYTES=5000", "a multiple of 64", NULL);
    refused("TALLY_PART_BYTES=128M", "out of range", NULL);
    assert_int_equal(load(&p, "TALLY_PART_BYTES=4160", NULL), 0);
    assert_int_equal(p.part_bytes, 4160);
    tly_params_finish(&p);
}

static void choices(void **state)
{
    struct tly_params p;
    assert_int_equal(load(&p, "TALLY_LOG=Debug", NULL), 0);
    assert_string_equal(p.log, "debug");
    tly_params_finish(&p);
    refused("TALLY_LOG=loud", "TALLY_LOG=loud", "off, error, warning, info or debug");
}

static void unknown_names(void **state)
{
    refused("TALLY_PRT=1", "did you mean TALLY_PORT?", NULL);
    refused("TALLY_PORT_BYTES=1", "did you mean TALLY_PORT or TALLY_PART_BYTES?", NULL);
    refused("TALLY_JION_TIMEOUT=1", "did you mean TALLY_JOIN_TIMEOUT?", NULL);
    refused("tally_port=1", "did you mean TALLY_PORT?", NULL);
    refused("TALLY_ZZZZZZZZ=1", "unknown setting TALLY_ZZZZZZZZ; `tally params` lists", NULL);
    refused("TALLY_PORT", "not of the form NAME=value", NULL);
    refused("=5", "unknown setting", NULL);
    setenv("TALLY_SERVER", "2", 1);
    refused(NULL, "unknown setting TALLY_SERVER;", "TALLY_SERVERS or TALLY_SERVERS_TIMEOUT?");
    unsetenv("TALLY_SERVER");
    setenv("TALLYHO", "2", 1); /* somebody else's */
    struct tly_params p;
    assert_int_equal(load(&p, NULL, NULL), 0);
    tly_params_finish(&p);
}

static void a_long_name_is_refused_too(void **state)
{
    char setting[5000];
    memset(setting, 'A', sizeof setting);
    memcpy(setting, "TALLY_", 6);
    strcpy(setting + sizeof setting - 3, "=1");
    struct tly_params p;
    assert_int_equal(load(&p, setting, NULL), -EINVAL);
    assert_true(strlen(why) < sizeof why);
}

static void secrets_are_never_shown(void **state)
{
    static const char secret[] = "hunter2hunter2hunter2";
    struct tly_params p;
    setenv("TALLY_SECRET", secret, 1);
    assert_int_equal(load(&p, NULL, NULL), 0);
    for (int f = TLY_PARAMS_TABLE; f <= TLY_PARAMS_TROFF; f++) {
        char *text = printed(&p, f);
        assert_null(strstr(text, secret));
        assert_non_null(strstr(text, "TALLY"));
        free(text);
    }
    tly_params_finish(&p);
    setenv("TALLY_SECRET", "hunter2", 1);
    refused(NULL, "TALLY_SECRET is too short: at least 16 bytes", NULL);
    assert_null(strstr(why, "hunter2"));
}

/* Only what must agree is in it. */
static void digest(void **state)
{
    struct tly_params p, q;
    char text[512], small[8];
    load(&p, NULL, NULL);
    load(&q, "TALLY_PORT=5", "TALLY_TIMEOUT=7");
    assert_true(tly_params_digest(&p) == tly_params_digest(&q));
    tly_params_finish(&q);
    load(&q, "TALLY_PART_BYTES=2M", NULL);
    assert_true(tly_params_digest(&p) != tly_params_digest(&q));
    tly_params_finish(&q);
    int len = tly_params_agreed_text(&p, text, sizeof text);
    assert_int_equal(len, strlen(text));
    assert_non_null(strstr(text, "TALLY_PART_BYTES=0"));
    assert_ptr_equal(strstr(text, "Tally "), text);
    /* Another patch may take part, another release may not. */
    const char *release = tly_release;
    uint64_t mine = tly_params_digest(&p);
    tly_release = "7.8.9";
    uint64_t other = tly_params_digest(&p);
    tly_release = "7.8.1";
    assert_true(tly_params_digest(&p) == other && other != mine);
    tly_release = release;
    assert_null(strstr(text, "TALLY_PORT"));
    assert_int_equal(tly_params_agreed_text(&p, small, sizeof small), len);
    assert_int_equal(strlen(small), sizeof small - 1);
    tly_params_finish(&p);
}

static void lists_are_complete(void **state)
{
    struct tly_params p;
    load(&p, "TALLY_JOB=a \"quoted\" one", NULL);
    char *text = printed(&p, TLY_PARAMS_JSON), *troff = printed(NULL, TLY_PARAMS_TROFF);
    char *list = printed(NULL, TLY_PARAMS_TABLE);
    /* But for what tests and our own launchers alone have to know. */
#define NAMED(name, ...) \
    if (!strstr("TALLY_MEASURED TALLY_SHARED_LOG TALLY_COORD_FROM TALLY_RANK TALLY_BESIDE", #name)) { \
        assert_non_null(strstr(text, #name)); \
        assert_non_null(strstr(troff, #name)); \
        assert_non_null(strstr(list, #name)); \
    }
    TLY_PARAM_TABLE(NAMED)
    assert_null(strstr(text, "TALLY_MEASURED"));
    assert_null(strstr(text, "TALLY_SHARED_LOG"));
    assert_non_null(strstr(text, "\"value\": \"a \\\"quoted\\\" one\""));
    free(text);
    free(troff);
    free(list);
    tly_params_finish(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(defaults, fresh),
        cmocka_unit_test_setup(precedence, fresh),
        cmocka_unit_test_setup(config_named_by_a_setting_wins, fresh),
        cmocka_unit_test_setup(config_errors_name_the_line, fresh),
        cmocka_unit_test_setup(sizes, fresh),
        cmocka_unit_test_setup(rates, fresh),
        cmocka_unit_test_setup(times, fresh),
        cmocka_unit_test_setup(ranges_and_multiples, fresh),
        cmocka_unit_test_setup(choices, fresh),
        cmocka_unit_test_setup(unknown_names, fresh),
        cmocka_unit_test_setup(a_long_name_is_refused_too, fresh),
        cmocka_unit_test_setup(secrets_are_never_shown, fresh),
        cmocka_unit_test_setup(digest, fresh),
        cmocka_unit_test_setup(lists_are_complete, fresh),
    };
    int fd = mkstemp(path);
    if (fd < 0)
        return 1;
    close(fd);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    unlink(path);
    return failed;
}
