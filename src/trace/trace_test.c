/* trace_test.c - stamps to slices, slices to a file and back, and clocks that are known to the test put
 * together. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"
#include "trace/trace.h"

#include <cmocka.h>

/* --- stamps -------------------------------------------------------------------------------------- */

enum { ROOM = 1024, KEY = 7 };

static char warning[1024];

static void catch_line(void *user, enum tally_log_level level, const char *line)
{
    snprintf(warning, sizeof warning, "%s", line);
}

struct folder {
    char path[32];
    char prefix[64];
};

static struct folder make_folder(void)
{
    struct folder f = {.path = "/tmp/trace-test-XXXXXX"};
    assert_non_null(mkdtemp(f.path));
    snprintf(f.prefix, sizeof f.prefix, "%s/run", f.path);
    return f;
}

static struct tly_process rank_0(void)
{
    return (struct tly_process){.job = "job", .host = "host", .start = 0x123456789abcdef0};
}

/* The slice of a row; the test fails unless it is the only one. */
static struct tly_slice only(const struct tly_process *p, enum tly_row row)
{
    const struct tly_slice *found = NULL;
    for (size_t i = 0; i < p->slice_count; i++)
        if (p->slices[i].row == row) {
            assert_null(found);
            found = &p->slices[i];
        }
    assert_non_null(found);
    return *found;
}

static struct tly_process slices_of(struct tly_trace *t, int64_t end)
{
    struct tly_process p = {0};
    int64_t kept = tly_trace_slices(t, end, &p);
    assert_true(kept >= 0);
    assert_int_equal((uint64_t)kept + p.lost, t->count);
    return p;
}

static void free_process(struct tly_process *p)
{
    free(p->slices);
    free(p->samples);
}

static struct tly_trace *make_trace(struct folder *f, struct tly_process who)
{
    *f = make_folder();
    struct tly_trace *t = tly_trace_create(f->prefix, ROOM * sizeof(struct tly_stamp), &who);
    assert_non_null(t);
    assert_int_equal(t->mask + 1, ROOM);
    return t;
}

static void end_trace(struct tly_trace *t, struct folder *f)
{
    unlink(t->path);
    tly_trace_destroy(t);
    assert_int_equal(rmdir(f->path), 0);
}

static void test_a_part_from_queue_to_result(void **state)
{
    struct folder f;
    struct tly_trace *t = make_trace(&f, rank_0());
    tly_stamp_at(t, 100, TLY_AT_SUBMITTED, TLY_NO_PEER, KEY, 3, TLY_NO_PART, 64);
    static const enum tly_moment moments[] = {TLY_AT_QUEUED, TLY_AT_ADMITTED,     TLY_AT_FIRST,
                                              TLY_AT_SENT,   TLY_AT_RESULT_FIRST, TLY_AT_LANDED};
    for (int i = 0; i < 6; i++)
        tly_stamp_at(t, 110 + 10 * i * i, moments[i], 2, KEY, 3, 1, 64);
    tly_stamp_at(t, 500, TLY_AT_DONE, TLY_NO_PEER, KEY, 3, TLY_NO_PART, 64);
    struct tly_process p = slices_of(t, 1000);
    assert_int_equal(p.slice_count, 6);
    for (int i = 0; i < 5; i++) {
        struct tly_slice s = only(&p, TLY_ROW_QUEUE + i);
        assert_int_equal(s.from, 110 + 10 * i * i);
        assert_int_equal(s.to, 110 + 10 * (i + 1) * (i + 1));
        assert_true(s.peer == 2 && s.part == 1 && s.round == 3 && s.bytes == 64 && !s.open);
    }
    struct tly_slice op = only(&p, TLY_ROW_OPERATION);
    assert_true(op.from == 100 && op.to == 500 && op.part == TLY_NO_PART && op.peer == TLY_NO_PEER);
    free_process(&p);
    end_trace(t, &f);
}

static void test_a_change_of_the_split(void **state)
{
    struct folder f;
    struct tly_trace *t = make_trace(&f, rank_0());
    for (uint32_t epoch = 2; epoch < 4; epoch++) {
        tly_stamp_at(t, 100 * epoch, TLY_AT_PREPARED, TLY_NO_PEER, 0, epoch, TLY_NO_PART, 4096);
        if (epoch == 2)
            tly_stamp_at(t, 150 * epoch, TLY_AT_COMMITTED, TLY_NO_PEER, 0, epoch, TLY_NO_PART, 4096);
    }
    struct tly_process p = slices_of(t, 1000);
    assert_int_equal(p.slice_count, 2);
    for (int i = 0; i < 2; i++) {
        const struct tly_slice *s = &p.slices[i];
        assert_true(s->row == TLY_ROW_CHANGE && s->part == TLY_NO_PART && s->bytes == 4096);
        assert_true(s->round == 2 ? s->from == 200 && s->to == 300 && !s->open : s->from == 300 && s->open);
    }
    free_process(&p);
    end_trace(t, &f);
}

static void test_what_has_not_ended_is_open(void **state)
{
    struct folder f;
    struct tly_trace *t = make_trace(&f, rank_0());
    tly_stamp_at(t, 100, TLY_AT_QUEUED, 0, KEY, 0, 0, 64);
    tly_stamp_at(t, 120, TLY_AT_ADMITTED, 0, KEY, 0, 0, 64);
    struct tly_process p = slices_of(t, 1000);
    assert_int_equal(p.slice_count, 2);
    assert_false(only(&p, TLY_ROW_QUEUE).open);
    struct tly_slice s = only(&p, TLY_ROW_LINE);
    assert_true(s.open && s.from == 120 && s.to == 1000);
    free_process(&p);
    end_trace(t, &f);
}

/* The first fragments of a result may come before the last of the push have gone. */
static void test_a_result_that_streams(void **state)
{
    struct folder f;
    struct tly_trace *t = make_trace(&f, rank_0());
    tly_stamp_at(t, 100, TLY_AT_FIRST, 0, KEY, 0, 0, 64);
    tly_stamp_at(t, 150, TLY_AT_RESULT_FIRST, 0, KEY, 0, 0, 64);
    tly_stamp_at(t, 200, TLY_AT_SENT, 0, KEY, 0, 0, 64);
    tly_stamp_at(t, 250, TLY_AT_LANDED, 0, KEY, 0, 0, 64);
    struct tly_process p = slices_of(t, 1000);
    assert_int_equal(p.slice_count, 2);
    assert_int_equal(only(&p, TLY_ROW_SEND).to, 200);
    assert_int_equal(only(&p, TLY_ROW_RESULT).from, 150);
    free_process(&p);
    end_trace(t, &f);
}

static void test_a_part_that_is_sent_again(void **state)
{
    struct folder f;
    struct tly_trace *t = make_trace(&f, rank_0());
    for (int again = 0; again < 2; again++) {
        tly_stamp_at(t, 100 + 100 * again, TLY_AT_QUEUED, 0, KEY, 0, 0, 64);
        tly_stamp_at(t, 110 + 100 * again, TLY_AT_ADMITTED, 0, KEY, 0, 0, 64);
        tly_stamp_at(t, 120 + 100 * again, TLY_AT_FIRST, 0, KEY, 0, 0, 64);
        tly_stamp_at(t, 130 + 100 * again, TLY_AT_SENT, 0, KEY, 0, 0, 64);
    }
    struct tly_process p = slices_of(t, 1000);
    int sends = 0;
    for (size_t i = 0; i < p.slice_count; i++)
        if (p.slices[i].row == TLY_ROW_SEND)
            assert_int_equal(p.slices[i].to, 130 + 100 * sends++);
    assert_int_equal(sends, 2);
    free_process(&p);
    end_trace(t, &f);
}

static void test_the_oldest_are_overwritten(void **state)
{
    struct folder f;
    struct tly_trace *t = make_trace(&f, rank_0());
    for (int i = 0; i < ROOM + 500; i++)
        tly_stamp_at(t, 1000 + i, i % 2 ? TLY_AT_SUMMED : TLY_AT_GATHERED, TLY_NO_PEER, KEY, (uint32_t)i / 2,
                     0, 4);
    struct tly_process p = slices_of(t, 100000);
    assert_int_equal(p.lost, 500);
    assert_int_equal(p.slice_count, ROOM / 2);
    for (size_t i = 0; i < p.slice_count; i++)
        assert_true(p.slices[i].from >= 1500 && p.slices[i].to == p.slices[i].from + 1);
    free_process(&p);
    end_trace(t, &f);
}

/* A slice whose beginning was overwritten is none, and its end is not taken for another's. */
static void test_half_a_slice_is_none(void **state)
{
    struct folder f;
    struct tly_trace *t = make_trace(&f, rank_0());
    tly_stamp_at(t, 100, TLY_AT_SENT, 0, KEY, 0, 0, 64);
    tly_stamp_at(t, 150, TLY_AT_LANDED, 0, KEY, 0, 0, 64);
    struct tly_process p = slices_of(t, 1000);
    assert_int_equal(p.slice_count, 0);
    free_process(&p);
    end_trace(t, &f);
}

static void name_by_key(void *user, uint64_t key, char *out, size_t len)
{
    snprintf(out, len, "tensor %d", (int)key);
}

static void test_the_file_and_its_name(void **state)
{
    struct folder f;
    struct tly_trace *t = make_trace(&f, rank_0());
    char want[128], why[256];
    snprintf(want, sizeof want, "%s.12345678.rank-0.json", f.prefix);
    assert_string_equal(t->path, want);
    tly_stamp_at(t, 100, TLY_AT_SUBMITTED, TLY_NO_PEER, KEY, 0, TLY_NO_PART, 4);
    tly_stamp_at(t, 200, TLY_AT_DONE, TLY_NO_PEER, KEY, 0, TLY_NO_PART, 4);
    tly_trace_write(t, name_by_key, NULL);
    tly_stamp_at(t, 300, TLY_AT_SUBMITTED, TLY_NO_PEER, KEY, 1, TLY_NO_PART, 4);
    tly_trace_write(t, name_by_key, NULL); /* once */
    struct tly_timeline line = {0};
    FILE *in = fopen(t->path, "r");
    assert_non_null(in);
    assert_int_equal(tly_timeline_read(in, &line, why, sizeof why), 0);
    fclose(in);
    assert_int_equal(line.count, 1);
    assert_int_equal(line.processes[0].slice_count, 1);
    assert_true(strlen(line.processes[0].clock) > 8);
    assert_string_equal(line.names[0].name, "tensor 7");
    tly_timeline_finish(&line);
    end_trace(t, &f);
    /* a name that ends with .json, and a service */
    struct tly_process service = rank_0();
    service.service = true;
    service.index = 5;
    service.incarnation = 0xfedcba9876543210;
    f = make_folder();
    char prefix[80];
    snprintf(prefix, sizeof prefix, "%s.json", f.prefix);
    t = tly_trace_create(prefix, 65536, &service);
    assert_non_null(t);
    snprintf(want, sizeof want, "%s.12345678.service-5-fedcba98.json", f.prefix);
    assert_string_equal(t->path, want);
    end_trace(t, &f);
}

static void test_what_cannot_be_is_a_warning(void **state)
{
    struct tly_process who = rank_0();
    tally_log_redirect(catch_line, NULL);
    assert_null(tly_trace_create("/nowhere/at/all", 65536, &who));
    assert_non_null(strstr(warning, "cannot write /nowhere/at/all.12345678.rank-0.json: No such file"));
    char *longest = malloc(5000);
    assert_non_null(longest);
    memset(longest, 'x', 4999);
    longest[4999] = '\0';
    assert_null(tly_trace_create(longest, 65536, &who));
    assert_non_null(strstr(warning, "the name is too long"));
    free(longest);
#if !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__) /* they end the process at such a request */
    assert_null(tly_trace_create("/nowhere/at/all", 1ull << 60, &who));
    assert_non_null(strstr(warning, "TALLY_TRACE_BYTES"));
#endif
    struct folder f;
    struct tly_trace *t = make_trace(&f, who);
    unlink(t->path);
    assert_int_equal(rmdir(f.path), 0); /* the folder goes while the job runs */
    tly_trace_write(t, NULL, NULL);
    assert_non_null(strstr(warning, "cannot write"));
    tly_trace_destroy(t);
    tally_log_redirect(NULL, NULL);
}

/* A full disk cuts a file off, which is of no use: it is left empty. */
static void test_a_full_disk(void **state)
{
    struct folder f;
    struct tly_trace *t = make_trace(&f, rank_0());
    struct rlimit old, full = {.rlim_cur = 1000};
    struct stat st;
    for (uint32_t i = 0; i < ROOM; i++)
        tly_stamp_at(t, 100 + i, i % 2 ? TLY_AT_DONE : TLY_AT_SUBMITTED, TLY_NO_PEER, KEY, i / 2, TLY_NO_PART,
                     4);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    full.rlim_max = old.rlim_max;
    signal(SIGXFSZ, SIG_IGN);
    tally_log_redirect(catch_line, NULL);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &full), 0);
    tly_trace_write(t, NULL, NULL);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    tally_log_redirect(NULL, NULL);
    assert_non_null(strstr(warning, "cannot write"));
    assert_int_equal(stat(t->path, &st), 0);
    assert_int_equal(st.st_size, 0);
    end_trace(t, &f);
}

/* --- the file ------------------------------------------------------------------------------------ */

static char *write_all(struct tly_timeline *t, size_t *len)
{
    char *text = NULL;
    FILE *out = open_memstream(&text, len);
    assert_non_null(out);
    assert_int_equal(tly_timeline_write(out, t), 0);
    fclose(out);
    return text;
}

static int read_all(const char *text, size_t len, struct tly_timeline *t, char *why, size_t why_len)
{
    FILE *in = len ? fmemopen((void *)text, len, "r") : fopen("/dev/null", "r");
    assert_non_null(in);
    int err = tly_timeline_read(in, t, why, why_len);
    fclose(in);
    return err;
}

static struct tly_timeline example(void)
{
    struct tly_timeline t = {0};
    for (int i = 0; i < 2; i++) {
        struct tly_process *p = tly_timeline_add(&t);
        *p = (struct tly_process){.service = i,
                                  .index = 3,
                                  .rank = i ? TLY_NO_PEER : 3,
                                  .start = 0xfedcba9876543210,
                                  .incarnation = (uint64_t)i << 40};
        snprintf(p->job, sizeof p->job, "a \"job\"");
        snprintf(p->host, sizeof p->host, "h\\");
        snprintf(p->machine, sizeof p->machine, "machine \"%d\"", i);
        snprintf(p->clock, sizeof p->clock, "clock %d", i);
        p->from = -7;
        p->to = 1ll << 50;
        p->offset = -12345;
        p->error = 678;
        p->lost = 9;
        for (int n = 0; n < 40; n++) {
            /* all rows, and slices of one row that overlap */
            struct tly_slice s = {.from = 1000000 + n * 1001,
                                  .to = 1000000 + n * 1001 + (n % 7) * 999,
                                  .key = (uint64_t)n % 3 << 40,
                                  .round = UINT32_MAX,
                                  .part = n % 4 ? (uint32_t)n : TLY_NO_PART,
                                  .bytes = 5,
                                  .peer = n % 2 ? 1 : TLY_NO_PEER,
                                  .row = (uint8_t)(i ? TLY_ROW_GATHER + n % 4 : n % TLY_ROW_GATHER),
                                  .open = n % 5 == 0};
            assert_int_equal(tly_timeline_slice(p, &s), 0);
        }
        assert_int_equal(tly_timeline_sample(p, &(struct tly_sample){1234567, 1ull << 40}), 0);
    }
    assert_int_equal(tly_timeline_name(&t, 0, "l\xc3\xa4yer\n1/\"w\"\\"), 0);
    assert_int_equal(tly_timeline_name(&t, 1ull << 40, "bad \xff\xc0\x80 bytes"), 0);
    return t;
}

static void test_written_and_read_again(void **state)
{
    struct tly_timeline a = example(), b = {0};
    size_t len, again_len;
    char why[256] = "", *text = write_all(&a, &len);
    assert_int_equal(read_all(text, len, &b, why, sizeof why), 0);
    assert_int_equal(b.count, 2);
    for (int i = 0; i < 2; i++) {
        struct tly_process *p = &a.processes[i], *q = &b.processes[i];
        assert_string_equal(p->job, q->job);
        assert_string_equal(p->host, q->host);
        assert_string_equal(p->machine, q->machine);
        assert_string_equal(p->clock, q->clock);
        assert_true(p->service == q->service && p->index == q->index && p->rank == q->rank &&
                    p->pid == q->pid && p->start == q->start && p->incarnation == q->incarnation &&
                    p->lost == q->lost && p->from == q->from && p->to == q->to && p->offset == q->offset &&
                    p->error == q->error);
        assert_int_equal(q->slice_count, 40);
        for (int n = 0; n < 40; n++) {
            const struct tly_slice *s = &p->slices[n], *r = &q->slices[n];
            assert_true(s->from == r->from && s->to == r->to && s->key == r->key && s->round == r->round &&
                        s->part == r->part && s->bytes == r->bytes && s->peer == r->peer &&
                        s->row == r->row && s->open == r->open);
        }
        assert_true(q->sample_count == 1 && q->samples[0].at == 1234567 && q->samples[0].bytes == 1ull << 40);
    }
    assert_int_equal(b.name_count, 2);
    assert_string_equal(b.names[0].name, "l\xc3\xa4yer\n1/\"w\"\\");
    assert_string_equal(b.names[1].name, "bad ??? bytes");
    char *again = write_all(&b, &again_len);
    assert_true(again_len == len && memcmp(text, again, len) == 0);
    free(text);
    free(again);
    tly_timeline_finish(&a);
    tly_timeline_finish(&b);
}

/* Wherever it is cut off, and whatever byte is another, the reader says so or reads something, and never
 * crashes. */
static void test_a_file_that_is_not_whole(void **state)
{
    struct tly_timeline a = example();
    size_t len;
    char *text = write_all(&a, &len);
    for (size_t n = 0; n + 1 < len; n += n < 2000 || n + 200 > len ? 1 : 97) {
        struct tly_timeline b = {0};
        char why[256] = "";
        assert_int_equal(read_all(text, n, &b, why, sizeof why), -ENODATA);
        assert_non_null(strstr(why, n ? "is cut off" : "is empty"));
        tly_timeline_finish(&b);
    }
    for (size_t n = 0; n < len; n += 3) {
        struct tly_timeline b = {0};
        char why[256] = "", old = text[n];
        text[n] ^= (char)(1 + n % 63);
        read_all(text, len, &b, why, sizeof why);
        text[n] = old;
        tly_timeline_finish(&b);
    }
    struct tly_timeline b = {0};
    char why[256];
    assert_int_equal(read_all("", 0, &b, why, sizeof why), -ENODATA);
    assert_non_null(strstr(why, "empty"));
    assert_int_equal(read_all("{}\n", 3, &b, why, sizeof why), -EINVAL);
    assert_non_null(strstr(why, "no trace of Tally's"));
    free(text);
    tly_timeline_finish(&a);
    tly_timeline_finish(&b);
}

/* --- clocks -------------------------------------------------------------------------------------- */

enum { RANKS = 3, SERVICES = 4, PARTS = 200, PROCESSES = RANKS + SERVICES };

struct world {
    struct tly_timeline t;
    int64_t ahead[PROCESSES + 1]; /* what the merge is to find; with room for one more */
    double drift[PROCESSES + 1];
};

static int64_t clock_of(const struct world *w, int process, int64_t now)
{
    return now + w->ahead[process] + (int64_t)((double)now * w->drift[process]);
}

static void add(struct world *w, int process, enum tly_row row, uint32_t peer, uint32_t part, int64_t from,
                int64_t to)
{
    struct tly_slice s = {.from = clock_of(w, process, from),
                          .to = clock_of(w, process, to),
                          .key = part % 5,
                          .round = part / 50,
                          .part = part,
                          .peer = peer,
                          .row = (uint8_t)row};
    assert_int_equal(tly_timeline_slice(&w->t.processes[process], &s), 0);
}

/* A part of rank r's goes to a service and comes back. */
static void exchange(struct world *w, int r, int process, int place, int part, int64_t now, int64_t came,
                     int64_t answered, int64_t back)
{
    add(w, r, TLY_ROW_SEND, (uint32_t)place, (uint32_t)part, now, now + 1000);
    add(w, process, TLY_ROW_PUSH, (uint32_t)r, (uint32_t)part, came, came + 1000);
    add(w, process, TLY_ROW_ANSWER, (uint32_t)r, (uint32_t)part, answered, answered + 1000);
    add(w, r, TLY_ROW_RESULT, (uint32_t)place, (uint32_t)part, back, back + 1000);
}

static int64_t some(int64_t most)
{
    return (int64_t)((double)rand() / RAND_MAX * (double)most);
}

/* Every rank sends each part to its service and has it back, with delays of 20 us to 1 ms each way. Service 0
 * runs in rank 0; rank 0 and service 3 exchange nothing, so that its clock is only known by way of others. */
static struct world make_world(double drift, bool connected)
{
    struct world w = {0};
    srand(5);
    for (int i = 0; i < PROCESSES; i++) {
        struct tly_process *p = tly_timeline_add(&w.t);
        assert_non_null(p);
        p->service = i >= RANKS;
        p->index = (uint32_t)(p->service ? i - RANKS : i);
        p->rank = i < RANKS ? p->index : i == RANKS ? 0 : TLY_NO_PEER;
        p->start = 77;
        snprintf(p->host, sizeof p->host, "h%d", i);
        snprintf(p->clock, sizeof p->clock, "c%d", i == RANKS ? 0 : i);
        w.ahead[i] = i == RANKS ? w.ahead[0] : some(1000 * TLY_SEC) + TLY_SEC;
        w.drift[i] = i == RANKS ? w.drift[0] : drift * (i - 2);
    }
    for (int part = 0; part < PARTS; part++)
        for (int r = 0; r < RANKS; r++) {
            int s = part % SERVICES, service = RANKS + s;
            if ((r == 0 && s == SERVICES - 1) || (!connected && r < 2 && s == SERVICES - 1))
                continue;
            if (!connected && r == 2 && s != SERVICES - 1)
                continue;
            int64_t now = 1 + (int64_t)part * TLY_SEC / 20 + some(TLY_MS);
            int64_t came = now + 20000 + some(TLY_MS), answered = came + 100000,
                    back = answered + 20000 + some(TLY_MS);
            exchange(&w, r, service, s, part, now, came, answered, back);
        }
    return w;
}

/* No message may come before it left. */
static int64_t worst_delay(const struct tly_timeline *t)
{
    int64_t worst = INT64_MAX;
    for (int r = 0; r < RANKS; r++)
        for (int s = 0; s < SERVICES; s++) {
            const struct tly_process *rank = &t->processes[r], *service = &t->processes[RANKS + s];
            for (size_t i = 0; i < rank->slice_count; i++)
                for (size_t j = 0; j < service->slice_count; j++) {
                    const struct tly_slice *a = &rank->slices[i], *b = &service->slices[j];
                    if (a->part != b->part || a->peer != (uint32_t)s || b->peer != (uint32_t)r)
                        continue;
                    int64_t delay = a->row == TLY_ROW_SEND && b->row == TLY_ROW_PUSH ? b->from - a->from
                                    : a->row == TLY_ROW_RESULT && b->row == TLY_ROW_ANSWER
                                        ? a->from - b->from
                                        : INT64_MAX;
                    worst = delay < worst ? delay : worst;
                }
        }
    return worst;
}

static void test_clocks_are_found(void **state)
{
    struct world w = make_world(0, true);
    int64_t slack = -1;
    size_t which;
    char why[256] = "";
    assert_int_equal(tly_timeline_merge(&w.t, &slack, &which, why, sizeof why), 0);
    assert_int_equal(slack, 0);
    for (int i = 0; i < PROCESSES; i++) {
        const struct tly_process *p = &w.t.processes[i];
        int64_t truth = w.ahead[i] - w.ahead[0];
        assert_true(llabs(p->offset - truth) <= p->error);
        /* Of 50 delays each way the least are near 40 us; by way of another clock twice that. */
        assert_true(p->error < 200000);
        assert_true(i == 0 || i == RANKS ? p->error == 0 : p->error > 0);
    }
    assert_true(worst_delay(&w.t) >= 0);
    tly_timeline_finish(&w.t);
}

static void test_clocks_that_run_apart(void **state)
{
    struct world w = make_world(500e-6, true); /* 5 ms in the 10 s of the trace */
    int64_t slack = -1;
    size_t which;
    char why[256] = "";
    assert_int_equal(tly_timeline_merge(&w.t, &slack, &which, why, sizeof why), 0);
    assert_true(slack > 0 && slack < 20 * TLY_MS);
    assert_true(worst_delay(&w.t) >= -slack);
    for (int i = 1; i < PROCESSES; i++) {
        int64_t truth = w.ahead[i] - w.ahead[0];
        assert_true(llabs(w.t.processes[i].offset - truth) < 20 * TLY_MS);
    }
    tly_timeline_finish(&w.t);
}

/* A part that was sent twice says nothing: which of the two met which is not known. */
static void test_a_part_sent_again_is_no_witness(void **state)
{
    struct world w = make_world(0, true);
    int64_t slack = -1;
    size_t which;
    char why[256] = "";
    add(&w, 1, TLY_ROW_SEND, 1, 1, 20 * TLY_SEC, 20 * TLY_SEC + 1); /* after it had come */
    assert_int_equal(tly_timeline_merge(&w.t, &slack, &which, why, sizeof why), 0);
    assert_int_equal(slack, 0);
    tly_timeline_finish(&w.t);
}

/* Service 3 goes, and another comes in its place, on another machine: what a rank sent to each is told apart by its
 * rounds, and so are the two in the file. */
static void test_a_place_that_two_have_had(void **state)
{
    struct world w = make_world(0, true);
    const int old = PROCESSES - 1, late = PROCESSES;
    struct tly_process *p = tly_timeline_add(&w.t);
    assert_non_null(p);
    *p = w.t.processes[old];
    p->incarnation = 5;
    snprintf(p->clock, sizeof p->clock, "late");
    p->slices = NULL;
    p->slice_count = p->slice_room = 0;
    w.ahead[late] = w.ahead[old] + 3 * TLY_SEC;
    for (int part = PARTS; part < 2 * PARTS; part++)
        for (int r = 1; r < RANKS; r++) {
            int64_t now = 1 + (int64_t)part * TLY_SEC / 20 + some(TLY_MS), came = now + 20000 + some(TLY_MS);
            exchange(&w, r, late, SERVICES - 1, part, now, came, came + 100000, came + 120000 + some(TLY_MS));
        }
    int64_t slack = -1;
    size_t which, len;
    char why[256] = "";
    assert_int_equal(tly_timeline_merge(&w.t, &slack, &which, why, sizeof why), 0);
    assert_int_equal(slack, 0);
    for (int i = 0; i <= PROCESSES; i++) {
        assert_true(llabs(w.t.processes[i].offset - (w.ahead[i] - w.ahead[0])) <= w.t.processes[i].error);
        assert_true(w.t.processes[i].error < 200000);
    }
    struct tly_timeline again = {0};
    char *text = write_all(&w.t, &len);
    assert_int_equal(read_all(text, len, &again, why, sizeof why), 0);
    for (int i = 0; i <= PROCESSES; i++)
        for (int j = 0; j < i; j++)
            assert_int_not_equal(again.processes[i].pid, again.processes[j].pid);
    free(text);
    tly_timeline_finish(&again);
    tly_timeline_finish(&w.t);
}

static void test_what_cannot_be_merged(void **state)
{
    int64_t slack;
    size_t which = 99;
    char why[256];
    struct world w = make_world(0, false);
    assert_int_equal(tly_timeline_merge(&w.t, &slack, &which, why, sizeof why), -EINVAL);
    assert_true(which == 2 && strstr(why, "no messages in common, both ways, with rank 0 on h0"));
    snprintf(w.t.processes[2].clock, sizeof w.t.processes[2].clock, "c1"); /* then it needs none */
    assert_int_equal(tly_timeline_merge(&w.t, &slack, &which, why, sizeof why), 0);
    assert_int_equal(w.t.processes[2].offset, w.t.processes[1].offset);
    tly_timeline_finish(&w.t);
    w = make_world(0, true);
    w.t.processes[4].start++;
    assert_int_equal(tly_timeline_merge(&w.t, &slack, &which, why, sizeof why), -EINVAL);
    assert_true(which == 4 && strstr(why, "is of another job"));
    w.t.processes[4].start--;
    w.t.processes[5].index = w.t.processes[4].index;
    assert_int_equal(tly_timeline_merge(&w.t, &slack, &which, why, sizeof why), -EINVAL);
    assert_true(which == 5 && strstr(why, "has service 1, and so has another file"));
    tly_timeline_finish(&w.t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_part_from_queue_to_result),
        cmocka_unit_test(test_a_change_of_the_split),
        cmocka_unit_test(test_what_has_not_ended_is_open),
        cmocka_unit_test(test_a_result_that_streams),
        cmocka_unit_test(test_a_part_that_is_sent_again),
        cmocka_unit_test(test_the_oldest_are_overwritten),
        cmocka_unit_test(test_half_a_slice_is_none),
        cmocka_unit_test(test_the_file_and_its_name),
        cmocka_unit_test(test_what_cannot_be_is_a_warning),
        cmocka_unit_test(test_a_full_disk),
        cmocka_unit_test(test_written_and_read_again),
        cmocka_unit_test(test_a_file_that_is_not_whole),
        cmocka_unit_test(test_clocks_are_found),
        cmocka_unit_test(test_clocks_that_run_apart),
        cmocka_unit_test(test_a_part_sent_again_is_no_witness),
        cmocka_unit_test(test_a_place_that_two_have_had),
        cmocka_unit_test(test_what_cannot_be_merged),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
