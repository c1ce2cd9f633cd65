/* straggler_test.c - a rank that keeps the others waiting is named by rank 0, and why it does: it computes longer, or
 * waits for a processor, or for memory from a disk.  The kernel's figures of that are the test's, so no machine's load disturbs it; the kernel's own
 * are tested beside src/base/stalls.c.  (Who is not to be named is tested beside src/plan/late.c.) */
#include <fcntl.h>
#include <setjmp.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include "base/clock.h"
#include "job.h"

#include <cmocka.h>

enum { COUNT = 50000, STEP_MS = 40, LONGER_MS = UNDER_SANITIZER ? 80 : 48, PATIENCE_MS = 120000 };
enum { GUESS_US = 100 }; /* FAULT_US in src/base/stalls.c */

struct board {
    atomic_int stop;
    int slow;                /* the rank whose steps take longer */
    double waits, they_wait; /* the part of the time in which it, and each of the others, has no processor */
    double pages;            /* the part of the time in which its memory comes from a disk */
};

static double waits, pages; /* of this rank */

/* Instead of libc's. */
int openat(int folder, const char *path, int flags, ...)
{
    va_list more;
    va_start(more, flags);
    int mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(more, int) : 0;
    va_end(more);
    if (strcmp(path, "/proc/pressure/io") == 0)
        return (int)syscall(SYS_openat, folder, "/dev/null", flags,
                            mode); /* a page takes what src/base/stalls.c guesses */
    if (!strstr(path, "/schedstat"))
        return (int)syscall(SYS_openat, folder, path, flags, mode);
    int fd = memfd_create("schedstat", MFD_CLOEXEC);
    double now = (double)tly_now();
    CHECK(dprintf(fd, "%.0f %.0f 1\n", (1 - waits) * now, waits * now) > 0);
    CHECK(lseek(fd, 0, SEEK_SET) == 0);
    return fd;
}

/* Likewise. */
int getrusage(__rusage_who_t who, struct rusage *out)
{
    int err = (int)syscall(SYS_getrusage, who, out);
    out->ru_majflt = (long)(pages * (double)tly_now() / TLY_SEC * 1e6 / GUESS_US);
    return err;
}

/* Steps until all have heard that it is enough. */
static int train(int rank, void *arg)
{
    static float x[COUNT];
    const struct board *b = arg;
    tally_comm *c;
    waits = rank == b->slow ? b->waits : b->they_wait;
    pages = rank == b->slow ? b->pages : 0;
    CHECK(tally_comm_open(NULL, &c) == 0);
    do {
        job_sleep_ms(rank == b->slow ? LONGER_MS : STEP_MS);
        for (size_t i = 0; i < COUNT; i++)
            x[i] = (float)atomic_load(&b->stop);
        tally_op *op;
        CHECK(tally_push_pull(c, "gradient", x, x, COUNT, TALLY_FLOAT32, TALLY_MAX, NULL, &op) == 0);
        CHECK(tally_op_wait(op, -1) == 0);
        tally_op_free(op);
    } while (x[0] == 0);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

/* Whether a line of the log has first one text and then the other. */
static bool has_line(const char *log, const char *first, const char *then)
{
    for (const char *at = log; (at = strstr(at, first)); at++) {
        const char *why = strstr(at, then), *end = strchr(at, '\n');
        if (why && end && why < end)
            return true;
    }
    return false;
}

static void must_be_named(struct job *j, const struct board *what, const char *why)
{
    struct board *b = job_shared(sizeof *b);
    char sentence[64];
    *b = *what;
    j->arg = b;
    j->main = train;
    snprintf(sentence, sizeof sentence, "the job is held up by rank %d (", b->slow);
    job_start(j);
    for (int waited = 0; !has_line(job_log(j, 0), sentence, why) && waited < PATIENCE_MS; waited += 100)
        job_sleep_ms(100);
    atomic_store(&b->stop, 1);
    job_finish(j);
    job_log_holds(j, 0, sentence);
    job_log_holds(j, 0, why);
    job_clear(j);
}

static void test_between_two_ranks(void **state)
{
    for (int slow = 0; slow < 2; slow++)
        must_be_named(&(struct job){.ranks = 2}, &(struct board){.slow = slow},
                      "), which computes longer than the others since ");
}

static void test_seen_by_a_tallyd_too(void **state)
{
    must_be_named(&(struct job){.ranks = 3, .tallyds = 1}, &(struct board){.slow = 2},
                  "), which computes longer than the others since ");
}

/* Each of them waits by the same factor for a processor. */
static void test_it_computes_on_a_busy_machine(void **state)
{
    must_be_named(&(struct job){.ranks = 2}, &(struct board){.slow = 1, .waits = .75, .they_wait = .75},
                  "), which computes longer than the others since ");
}

static void test_it_waits_for_a_processor(void **state)
{
    must_be_named(&(struct job){.ranks = 2}, &(struct board){.slow = 1, .waits = .75},
                  "), which waits for a processor longer than the others since ");
}

static void test_it_waits_for_memory(void **state)
{
    must_be_named(&(struct job){.ranks = 2}, &(struct board){.slow = 1, .pages = .75},
                  "), which waits longer than the others for memory from a disk since ");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_between_two_ranks),
        cmocka_unit_test(test_seen_by_a_tallyd_too),
        cmocka_unit_test(test_it_computes_on_a_busy_machine),
        cmocka_unit_test(test_it_waits_for_a_processor),
        cmocka_unit_test(test_it_waits_for_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
