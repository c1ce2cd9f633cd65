/* words.c - FAKE_VERBS, the calls that it lets fail, and what is counted. */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "test/rdma/fake_verbs/library.h"

static pthread_mutex_t words_lock = PTHREAD_MUTEX_INITIALIZER; /* guards the next four */
static bool words_taken;
static struct {
    char call[40];
    int code, at, times, seen;
} failing;
static struct fake_settings settings;
static uint64_t random_state;
static _Atomic uint64_t own[FAKE_COUNTS], *all;

void fake_die(const char *format, ...)
{
    va_list list;
    va_start(list, format);
    fprintf(stderr, "fake_verbs: ");
    vfprintf(stderr, format, list);
    fprintf(stderr, "\n");
    va_end(list);
    abort();
}

static int words_errno(const char *name)
{
    for (int i = 1; i < 134; i++)
        if (strerrorname_np(i) && strcmp(strerrorname_np(i), name) == 0)
            return i;
    fake_die("what is %s?", name);
}

static void words_let_fail(const char *what)
{
    char code[24];
    memset(&failing, 0, sizeof failing);
    failing.at = failing.times = 1;
    if (sscanf(what, "%39[^:]:%23[^:]:%d:%d", failing.call, code, &failing.at, &failing.times) < 2)
        fake_die("what is fail=%s?", what);
    failing.code = words_errno(code);
}

static void words_count_in(const char *path)
{
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, sizeof own) != 0)
        fake_die("cannot count in %s", path);
    all = mmap(NULL, sizeof own, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (all == MAP_FAILED)
        fake_die("cannot count in %s", path);
    close(fd);
}

static void words_take_number(const char *word)
{
    struct fake_faults *f = &settings.faults;
    const struct {
        const char *name;
        uint64_t *to;
    } numbers[] = {
        {"seed", &f->seed}, {"random", &f->random}, {"delay", &f->delay_us},        {"pieces", &f->pieces},
        {"lost", &f->lost}, {"vanish", &f->vanish}, {"memlock", &settings.memlock},
    };
    size_t length = strcspn(word, "=");
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (strlen(numbers[i].name) == length && strncmp(numbers[i].name, word, length) == 0) {
            *numbers[i].to = strtoull(word + length + 1, NULL, 10);
            return;
        }
    fake_die("what is %s?", word);
}

static void words_take(const char *word)
{
    char path[256];
    if (strcmp(word, "infiniband") == 0)
        settings.infiniband = true;
    else if (strcmp(word, "dontfork") == 0)
        settings.dontfork = true;
    else if (strcmp(word, "down") == 0)
        settings.faults.down = true;
    else if (strcmp(word, "silent") == 0)
        settings.faults.silent = true;
    else if (strcmp(word, "purge") == 0)
        settings.faults.purge = true;
    else if (strncmp(word, "fail=", 5) == 0)
        words_let_fail(word + 5);
    else if (sscanf(word, "count=%255s", path) == 1)
        words_count_in(path);
    else if (sscanf(word, "fabric=%99s", settings.fabric) != 1 &&
             sscanf(word, "log=%199s", settings.log) != 1 &&
             sscanf(word, "devices=%d", &settings.devices) != 1 &&
             sscanf(word, "inline=%d", &settings.inline_bytes) != 1 &&
             sscanf(word, "wr=%d", &settings.wr) != 1 && sscanf(word, "cqe=%d", &settings.cqe) != 1)
        words_take_number(word);
}

static void words_take_list(const char *list)
{
    char words[2048], *save = NULL;
    memset(&failing, 0, sizeof failing);
    settings = (struct fake_settings){.devices = 64,
                                      .inline_bytes = FAKE_INLINE,
                                      .wr = FAKE_MOST_WR,
                                      .cqe = FAKE_MOST_CQE,
                                      .memlock = UINT64_MAX};
    snprintf(words, sizeof words, "%s", list ? list : "");
    for (char *w = strtok_r(words, " ", &save); w; w = strtok_r(NULL, " ", &save))
        words_take(w);
    random_state = settings.faults.seed;
    words_taken = true;
}

const struct fake_settings *fake_settings(void)
{
    pthread_mutex_lock(&words_lock);
    if (!words_taken)
        words_take_list(getenv("FAKE_VERBS"));
    pthread_mutex_unlock(&words_lock);
    return &settings;
}

void fake_take_words(const char *words)
{
    pthread_mutex_lock(&words_lock);
    words_take_list(words);
    pthread_mutex_unlock(&words_lock);
}

/* May a card refuse it at any time? */
static bool words_may_fail(const char *call)
{
    static const char *const calls[] = {"ibv_open_device",         "ibv_alloc_pd",  "ibv_reg_mr",
                                        "ibv_create_comp_channel", "ibv_create_cq", "ibv_create_qp",
                                        "ibv_modify_qp",           "post_send",     "post_recv"};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
        if (strcmp(calls[i], call) == 0)
            return true;
    return false;
}

int fake_fails(const char *call)
{
    int code = 0;
    fake_settings();
    pthread_mutex_lock(&words_lock);
    if (strcmp(failing.call, call) == 0 && ++failing.seen >= failing.at &&
        failing.seen - failing.at < failing.times)
        code = failing.code;
    if (settings.faults.random && words_may_fail(call) &&
        fake_random(&random_state) % settings.faults.random == 0)
        code = ENOMEM;
    pthread_mutex_unlock(&words_lock);
    return code;
}

void fake_add(enum fake_verbs_count which, int64_t n)
{
    atomic_fetch_add(&own[which], (uint64_t)n);
    if (all)
        atomic_fetch_add(&all[which], (uint64_t)n);
}

uint64_t fake_own_count(enum fake_verbs_count which)
{
    return atomic_load(&own[which]);
}
