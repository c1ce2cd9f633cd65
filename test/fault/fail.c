/* fail.c - the fail points of programs that are built for it: FAULT_FAIL="ROLE DOES TYPE:COUNT:WHAT", as in
 * "coordinator has sent COMMIT:7:kill".  At the COUNT-th time that the process comes there it is killed, or sleeps for WHAT
 * milliseconds with its loop's lock held.  It says so before. */
#include "base/fail.h"

#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "wire/frame.h"
#include "wire/hello.h"

static const char *const roles[] = {[TLY_ROLE_RANK] = "rank",
                                    [TLY_ROLE_TALLYD] = "tallyd",
                                    [TLY_ROLE_SERVICE] = "service",
                                    [TLY_ROLE_COORDINATOR] = "coordinator",
                                    [TLY_ROLE_WATCHER] = "watcher"};

static const char *const types[TLY_FRAME_TYPES] = {
    [TLY_HELLO] = "HELLO",   [TLY_ROSTER] = "ROSTER", [TLY_INVITE] = "INVITE",     [TLY_PREPARE] = "PREPARE",
    [TLY_BEGUN] = "BEGUN",   [TLY_COMMIT] = "COMMIT", [TLY_COMPLAIN] = "COMPLAIN", [TLY_PUSH] = "PUSH",
    [TLY_RESULT] = "RESULT", [TLY_SPEC] = "SPEC",     [TLY_VERDICT] = "VERDICT",   [TLY_CANCEL] = "CANCEL",
    [TLY_AGAIN] = "AGAIN",   [TLY_HAVE] = "HAVE",     [TLY_DONE] = "DONE",         [TLY_FINAL] = "FINAL",
    [TLY_COUNTS] = "COUNTS", [TLY_BEAT] = "BEAT",     [TLY_STATUS] = "STATUS",     [TLY_GOODBYE] = "GOODBYE",
    [TLY_PACE] = "PACE",     [TLY_GROUP] = "GROUP",   [TLY_RETURN] = "RETURN"};

void tly_fail_at(uint32_t role, const char *does, uint32_t type)
{
    static atomic_int passed;
    const char *plan = getenv("FAULT_FAIL");
    char here[64], line[100];
    if (!plan || type >= TLY_FRAME_TYPES || !types[type])
        return;
    int n = snprintf(here, sizeof here, "%s %s %s:", roles[role], does, types[type]);
    if (strncmp(plan, here, (size_t)n) != 0)
        return;
    char *what;
    long count = strtol(plan + n, &what, 10);
    if (*what++ != ':' || atomic_fetch_add(&passed, 1) + 1 != count)
        return;
    n = snprintf(line, sizeof line, "fail point: %s\n", plan);
    n = (int)write(STDERR_FILENO, line, (size_t)n);
    if (strcmp(what, "kill") == 0)
        kill(getpid(), SIGKILL);
    long ms = strtol(what, NULL, 10);
    nanosleep(&(struct timespec){ms / 1000, ms % 1000 * 1000000}, NULL);
}
