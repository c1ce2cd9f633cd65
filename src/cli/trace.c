/* trace.c - `tally trace`: the timelines that TALLY_TRACE has left, on one clock, or in a few figures. */
#include "cli/cli.h"

#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "trace/timeline.h"

const char tly_cli_trace_usage[] =
    "usage: tally trace merge [-o OUT] FILE...\n"
    "       tally trace summary FILE...\n"
    "\n"
    "Reads the files that the processes of one job write with TALLY_TRACE=NAME:\n"
    "NAME.START.rank-I.json and NAME.START.service-I-LIFE.json.  Each also opens in Perfetto by itself.\n"
    "\n"
    "merge    makes one file for Perfetto, with all timelines on rank 0's clock; prints by how much\n"
    "         each clock was ahead, and how uncertain that is\n"
    "summary  prints how long parts spent in each stage, and for what share of the time each\n"
    "         machine neither sent nor received\n"
    "\n"
    "  -o, --output OUT  merge: write to this file (standard output)\n";

struct input {
    struct tly_timeline t;
    const char **file; /* owned: of each process */
};

static void trace_finish(struct input *in)
{
    tly_timeline_finish(&in->t);
    free(in->file);
}

static void trace_say_left_out(const char *file, const char *why)
{
    tly_cli_say("trace", "%s is left out: it %s", file, why);
}

/* A file that is empty or cut off is left out: the others still tell what their processes did. */
static int trace_read_files(struct input *in, int count, char **names)
{
    char why[256];
    for (int i = 0; i < count; i++) {
        FILE *file = fopen(names[i], "re");
        if (!file)
            return tly_cli_fail("trace", "cannot open %s: %s", names[i], strerror(errno));
        size_t before = in->t.count;
        int err = tly_timeline_read(file, &in->t, why, sizeof why);
        fclose(file);
        if (err == -ENODATA) {
            while (in->t.count > before)
                tly_timeline_leave_out(&in->t, in->t.count - 1);
            trace_say_left_out(names[i], why);
            continue;
        }
        if (err)
            return tly_cli_fail("trace", "%s %s", names[i], why);
        const char **more = reallocarray(in->file, in->t.count, sizeof *more);
        if (!more)
            return tly_cli_fail("trace", "out of memory");
        in->file = more;
        for (size_t p = before; p < in->t.count; p++)
            more[p] = names[i];
    }
    return in->t.count ? 0 : tly_cli_fail("trace", "no file is left");
}

/* --- merge --------------------------------------------------------------------------------------- */

static void trace_print_clocks(FILE *out, const struct tly_timeline *t, int64_t slack)
{
    char title[128];
    fprintf(out, "%-40s %16s %14s %10s %8s\n", "", "clock ahead, us", "give or take", "slices", "lost");
    for (size_t i = 0; i < t->count; i++) {
        const struct tly_process *p = &t->processes[i];
        tly_process_title(p, title, sizeof title);
        fprintf(out, "%-40s %16.3f %14.3f %10zu %8" PRIu64 "\n", title, (double)p->offset / 1e3,
                (double)p->error / 1e3, p->slice_count, p->lost);
    }
    if (slack)
        fprintf(out, "the clocks did not run alike: messages contradict one another by %.3f us\n",
                (double)slack / 1e3);
}

/* A process that has exchanged nothing is left out: nothing tells how far its clock is off. */
static void trace_leave_out_idle(struct input *in)
{
    struct tly_timeline *t = &in->t;
    size_t busy = 0;
    for (size_t i = 0; i < t->count; i++)
        busy += t->processes[i].slice_count > 0;
    for (size_t i = 0; i < t->count && busy;) {
        if (t->processes[i].slice_count || t->processes[i].lost) {
            i++;
            continue;
        }
        trace_say_left_out(in->file[i], "holds nothing that its process has exchanged");
        tly_timeline_leave_out(t, i);
        memmove(&in->file[i], &in->file[i + 1], (t->count - i) * sizeof *in->file);
    }
}

static int trace_merge(struct input *in, const char *to)
{
    char why[256];
    size_t which = 0;
    int64_t slack = 0;
    trace_leave_out_idle(in);
    if (tly_timeline_merge(&in->t, &slack, &which, why, sizeof why) != 0)
        return tly_cli_fail("trace", "%s %s", in->file[which], why);
    FILE *out = to ? fopen(to, "we") : stdout;
    if (!out)
        return tly_cli_fail("trace", "cannot write %s: %s", to, strerror(errno));
    bool failed = tly_timeline_write(out, &in->t) != 0;
    int err = errno;
    if (to && fclose(out) != 0) {
        failed = true;
        err = errno;
    }
    struct stat st;
    if (failed && to) {
        if (stat(to, &st) == 0 && S_ISREG(st.st_mode))
            unlink(to);
        return tly_cli_fail("trace", "cannot write %s: %s", to, strerror(err));
    }
    trace_print_clocks(to ? stdout : stderr, &in->t, slack);
    return 0; /* main() looks after standard output */
}

/* --- summary ------------------------------------------------------------------------------------- */

struct range {
    int64_t from, to;
};

static int trace_by_number(const void *x, const void *y)
{
    int64_t a = *(const int64_t *)x, b = *(const int64_t *)y;
    return (a > b) - (a < b);
}

/* Nanoseconds that at least one of the ranges covers.  Sorts them (by their beginnings). */
static int64_t trace_covered(struct range *r, size_t count)
{
    int64_t sum = 0, end = INT64_MIN;
    qsort(r, count, sizeof *r, trace_by_number);
    for (size_t i = 0; i < count; i++) {
        int64_t from = r[i].from > end ? r[i].from : end;
        if (r[i].to > from)
            sum += r[i].to - from;
        if (r[i].to > end)
            end = r[i].to;
    }
    return sum;
}

static int trace_print_stages(struct tly_process *p)
{
    char title[128];
    int64_t *took = malloc((p->slice_count + 1) * sizeof *took);
    if (!took)
        return tly_cli_fail("trace", "out of memory");
    tly_process_title(p, title, sizeof title);
    printf("%s%s\n  %-10s %10s %12s %12s   us\n", title,
           p->lost ? " (its beginning was overwritten: TALLY_TRACE_BYTES)" : "", "", "count", "median",
           "p99");
    for (int row = 0; row < TLY_ROWS; row++) {
        size_t n = 0;
        for (size_t i = 0; i < p->slice_count; i++)
            if (p->slices[i].row == row && !p->slices[i].open)
                took[n++] = p->slices[i].to - p->slices[i].from;
        if (!n)
            continue;
        qsort(took, n, sizeof *took, trace_by_number);
        int64_t median = took[n / 2], p99 = took[n - 1 - n / 100];
        printf("  %-10s %10zu %12.1f %12.1f\n", tly_rows[row].name, n, (double)median / 1e3,
               (double)p99 / 1e3);
    }
    free(took);
    return 0;
}

static bool trace_is_neighbour(const struct tly_process *p, const struct tly_process *q)
{
    return strcmp(p->machine, q->machine) == 0;
}

/* Is the other end of the slice on the same machine?  There all have one clock, which tells services apart that have
 * had one place. */
static bool trace_stays_home(const struct tly_timeline *t, const struct tly_process *p,
                             const struct tly_slice *s)
{
    for (size_t i = 0; i < t->count; i++) {
        const struct tly_process *q = &t->processes[i];
        if (q->service != p->service && q->index == s->peer && trace_is_neighbour(p, q) &&
            q->from <= s->from && s->from <= q->to)
            return true;
    }
    return false;
}

static void trace_machine_title(const struct tly_timeline *t, const struct tly_process *p, char *out,
                                size_t len)
{
    char first[128], more[32] = "";
    int others = -1;
    for (size_t i = 0; i < t->count; i++)
        others += trace_is_neighbour(p, &t->processes[i]);
    if (others)
        snprintf(more, sizeof more, " and %d more", others);
    tly_process_title(p, first, sizeof first);
    snprintf(out, len, "%s%s", first, more);
}

/* Ranks, services and tallyd of one machine share a network card. */
static int trace_print_idle(const struct tly_timeline *t, size_t first)
{
    const struct tly_process *p = &t->processes[first];
    size_t most = 0, count[2] = {0};
    int64_t from = INT64_MAX, to = INT64_MIN;
    for (size_t i = 0; i < t->count; i++)
        most += t->processes[i].slice_count;
    struct range *range[2] = {malloc((most + 1) * sizeof(struct range)),
                              malloc((most + 1) * sizeof(struct range))};
    for (size_t i = first; i < t->count && range[0] && range[1]; i++) {
        const struct tly_process *q = &t->processes[i];
        if (!trace_is_neighbour(p, q))
            continue;
        for (size_t n = 0; n < q->slice_count; n++) {
            const struct tly_slice *s = &q->slices[n];
            from = s->from < from ? s->from : from;
            to = s->to > to ? s->to : to;
            bool out = s->row == TLY_ROW_SEND || s->row == TLY_ROW_ANSWER;
            bool in = s->row == TLY_ROW_RESULT || s->row == TLY_ROW_PUSH;
            if ((out || in) && !trace_stays_home(t, q, s))
                range[in][count[in]++] = (struct range){s->from, s->to};
        }
    }
    if (to > from && range[0] && range[1]) {
        char title[160];
        double wall = (double)(to - from);
        trace_machine_title(t, p, title, sizeof title);
        printf("%-40s %9.1f%% %9.1f%% %12.6f\n", title,
               100 * (1 - (double)trace_covered(range[0], count[0]) / wall),
               100 * (1 - (double)trace_covered(range[1], count[1]) / wall), wall / 1e9);
    }
    bool failed = !range[0] || !range[1];
    free(range[0]);
    free(range[1]);
    return failed ? tly_cli_fail("trace", "out of memory") : 0;
}

static int trace_summary(struct input *in)
{
    struct tly_timeline *t = &in->t;
    int status = 0;
    char why[256];
    size_t which = 0;
    if (tly_timeline_check(t, &which, why, sizeof why) != 0)
        return tly_cli_fail("trace", "%s %s", in->file[which], why);
    for (size_t i = 0; i < t->count && !status; i++)
        status = trace_print_stages(&t->processes[i]);
    if (!status)
        printf("\n%-40s %10s %10s %12s\n", "machine", "sends not", "receives not", "of seconds");
    for (size_t i = 0; i < t->count && !status; i++) {
        bool seen = false;
        for (size_t j = 0; j < i; j++)
            seen |= trace_is_neighbour(&t->processes[i], &t->processes[j]);
        if (!seen)
            status = trace_print_idle(t, i);
    }
    return status;
}

int tly_cli_trace(int argc, char **argv)
{
    static const struct option options[] = {
        {"output", required_argument, NULL, 'o'}, {"help", no_argument, NULL, 'h'}, {0}};
    const char *to = NULL;
    for (int c; (c = getopt_long(argc, argv, "o:h", options, NULL)) != -1;) {
        switch (c) {
        case 'o':
            to = optarg;
            break;
        case 'h':
            fputs(tly_cli_trace_usage, stdout);
            return 0;
        default:
            return CLI_USAGE;
        }
    }
    const char *what = argv[optind];
    bool merges = what && strcmp(what, "merge") == 0;
    if (!what || (!merges && strcmp(what, "summary") != 0))
        return tly_cli_misuse("trace", "%s%s", what ? "merge or summary, not " : "merge or summary is needed",
                              what ? what : "");
    if (to && !merges)
        return tly_cli_misuse("trace", "-o goes with merge");
    if (optind + 1 == argc)
        return tly_cli_misuse("trace", "%s needs files", what);
    struct input in = {0};
    int status = trace_read_files(&in, argc - optind - 1, argv + optind + 1);
    if (!status)
        status = merges ? trace_merge(&in, to) : trace_summary(&in);
    trace_finish(&in);
    return status;
}
