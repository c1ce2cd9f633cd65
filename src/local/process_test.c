/* process_test.c - what a line of /proc/PID/task/TID/stat says of a thread; a process that has ended, and one that has not. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "local/process.h"

#include <cmocka.h>

static enum tly_life life_of(const char *name, char state, unsigned flags, unsigned long signals)
{
    char line[400];
    snprintf(line, sizeof line,
             "4711 (%s) %c 4700 4711 4700 34816 4711 %u 300 0 1 0 12 4 0 0 20 0 9 0 5559 8192000 412 "
             "18446744073709551615 94429350514688 94429350534569 140729007088432 0 0 %lu 4 4096 8 1 0 0 17 1 "
             "0 0\n",
             name, state, flags, signals);
    return tly_process_life(line);
}

static void test_line(void **state)
{
    enum {
        FORKED = 0x40,
        MEMALLOC = 0x800,
        EXITING = 0x4,
        PAST_DUMP = 0x8,
        SIG_KILL = 0x100,
        SIG_TERM = 0x4000
    };
    assert_int_equal(life_of("train", 'S', FORKED | MEMALLOC, 0), TLY_LIVES);
    assert_int_equal(life_of("train", 'S', FORKED, SIG_TERM), TLY_LIVES);
    assert_int_equal(life_of("train", 'S', FORKED, SIG_TERM | SIG_KILL), TLY_DIES); /* not yet woken */
    assert_int_equal(life_of("train", 'R', FORKED | EXITING, 0), TLY_DIES);
    assert_int_equal(life_of("train", 'D', FORKED | PAST_DUMP, 0), TLY_DIES);
    assert_int_equal(life_of("train", 'Z', FORKED | EXITING, 0), TLY_DIES);
    assert_int_equal(life_of("train", 'R', FORKED, 0), TLY_MAY_LIVE);
    assert_int_equal(life_of("a (b) R 1 2\n) Z (", 'S', 0, 0), TLY_LIVES);
    assert_int_equal(life_of("", 'R', EXITING, 0), TLY_DIES);
    assert_int_equal(tly_process_life(""), TLY_MAY_LIVE);
    assert_int_equal(tly_process_life("4711 (train) S 1 2 3"), TLY_MAY_LIVE);
}

static void test_process(void **state)
{
    int me = (int)syscall(SYS_pidfd_open, getpid(), 0);
    if (me < 0)
        skip();
    pid_t pid = fork();
    if (pid == 0)
        _exit(0);
    int child = (int)syscall(SYS_pidfd_open, pid, 0);
    assert_int_equal(waitid(P_PID, (id_t)pid, NULL, WEXITED | WNOWAIT), 0);
    assert_true(tly_process_has_died(child));
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    assert_true(tly_process_has_died(child));
    assert_false(tly_process_has_died(me));
    close(child);
    close(me);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_line), cmocka_unit_test(test_process)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
