/* timeline.c - writes slices of time to a file in Chrome's trace format; read.c reads it back.
 *
 *   {"displayTimeUnit":"ns","traceEvents":[
 *   {"ph":"M","pid":1,"name":"tally_process",...   one for each process; what follows is of that process
 *   {"ph":"M","pid":1,"name":"tally_tensor",...    names of tensors, in the first process for all
 *   {"ph":"M","pid":1,"name":"process_name",...    for the viewer: reading skips these
 *   {"ph":"X","pid":1,"tid":...                    a slice in a row of its own: transfers and sums
 *   {"ph":"b",... {"ph":"e",...                    a slice among many at once: what waits
 *   {"ph":"C",...                                  bytes in flight
 *   {"ph":"M","pid":1,"name":"tally_end",...       how many there were
 *   ]}
 *
 * A viewer wants slices of one row nested or apart, so rows of transfers have as many lanes as needed. What
 * waits may be thousands of parts at once: those are asynchronous events, which viewers stack by themselves. */
#include "trace/timeline.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/text.h"

enum { LANES = 64, LIFE_PID = 1000000 };

const struct tly_row_facts tly_rows[TLY_ROWS] = {
    [TLY_ROW_OPERATION] = {"operation", .waits = true},
    [TLY_ROW_QUEUE] = {"queue", "for service", .waits = true},
    [TLY_ROW_LINE] = {"admitted", "for service", .waits = true},
    [TLY_ROW_SEND] = {"send", "to service"},
    [TLY_ROW_WAIT] = {"wait", "for service", .waits = true},
    [TLY_ROW_RESULT] = {"result", "of service"},
    [TLY_ROW_CHANGE] = {"change", .waits = true},
    [TLY_ROW_GATHER] = {"gather", .waits = true, .service = true},
    [TLY_ROW_PUSH] = {"push", "of rank", .service = true},
    [TLY_ROW_SUM] = {"sum", .service = true},
    [TLY_ROW_ANSWER] = {"answer", "to rank", .service = true},
};

/* --- in memory ----------------------------------------------------------------------------------- */

void tly_timeline_finish(struct tly_timeline *t)
{
    for (size_t i = 0; i < t->count; i++) {
        free(t->processes[i].slices);
        free(t->processes[i].samples);
    }
    for (size_t i = 0; i < t->name_count; i++)
        free(t->names[i].name);
    free(t->processes);
    free(t->names);
    *t = (struct tly_timeline){0};
}

struct tly_process *tly_timeline_add(struct tly_timeline *t)
{
    struct tly_process *more = realloc(t->processes, (t->count + 1) * sizeof *more);
    if (!more)
        return NULL;
    t->processes = more;
    more[t->count] = (struct tly_process){.rank = TLY_NO_PEER};
    return &more[t->count++];
}

/* Room for one more. */
static int timeline_grow(void **array, size_t count, size_t *room, size_t size)
{
    if (count < *room)
        return 0;
    size_t larger = *room ? *room * 2 : 256;
    void *more = reallocarray(*array, larger, size);
    if (!more)
        return -ENOMEM;
    *array = more;
    *room = larger;
    return 0;
}

int tly_timeline_slice(struct tly_process *p, const struct tly_slice *s)
{
    if (timeline_grow((void **)&p->slices, p->slice_count, &p->slice_room, sizeof *s) != 0)
        return -ENOMEM;
    p->slices[p->slice_count++] = *s;
    return 0;
}

int tly_timeline_sample(struct tly_process *p, const struct tly_sample *s)
{
    if (timeline_grow((void **)&p->samples, p->sample_count, &p->sample_room, sizeof *s) != 0)
        return -ENOMEM;
    p->samples[p->sample_count++] = *s;
    return 0;
}

int tly_timeline_name(struct tly_timeline *t, uint64_t key, const char *name)
{
    char *copy = strdup(name);
    if (!copy || timeline_grow((void **)&t->names, t->name_count, &t->name_room, sizeof *t->names) != 0) {
        free(copy);
        return -ENOMEM;
    }
    t->names[t->name_count++] = (struct tly_name){key, copy};
    t->names_sorted = false;
    return 0;
}

void tly_process_title(const struct tly_process *p, char *out, size_t len)
{
    if (!p->service)
        snprintf(out, len, "rank %u on %s", p->index, p->host);
    else if (p->rank == TLY_NO_PEER)
        snprintf(out, len, "service %u (tallyd %08x) on %s", p->index, (unsigned)(p->incarnation >> 32),
                 p->host);
    else
        snprintf(out, len, "service %u (in rank %u) on %s", p->index, p->rank, p->host);
    tly_text_clean(out); /* a file may name any host */
}

#define ORDER(a, b) \
    if ((a) != (b)) \
    return (a) < (b) ? -1 : 1

static int timeline_by_time(const void *x, const void *y)
{
    const struct tly_slice *a = x, *b = y;
    ORDER(a->row, b->row);
    ORDER(a->peer, b->peer);
    ORDER(a->from, b->from);
    ORDER(a->to, b->to);
    ORDER(a->key, b->key);
    ORDER(a->part, b->part);
    return 0;
}

static int timeline_by_part(const void *x, const void *y)
{
    const struct tly_slice *a = x, *b = y;
    ORDER(a->row, b->row);
    ORDER(a->peer, b->peer);
    ORDER(a->key, b->key);
    ORDER(a->round, b->round);
    ORDER(a->part, b->part);
    ORDER(a->from, b->from);
    return 0;
}

static int timeline_by_key(const void *x, const void *y)
{
    const struct tly_name *a = x, *b = y;
    ORDER(a->key, b->key);
    return 0;
}

void tly_process_sort(struct tly_process *p, bool time)
{
    if (p->slice_count)
        qsort(p->slices, p->slice_count, sizeof *p->slices, time ? timeline_by_time : timeline_by_part);
}

/* Sort the names, one for each key. */
static void timeline_sort_names(struct tly_timeline *t)
{
    size_t kept = 0;
    if (t->names_sorted || !t->name_count)
        return;
    qsort(t->names, t->name_count, sizeof *t->names, timeline_by_key);
    for (size_t i = 0; i < t->name_count; i++) {
        if (kept && t->names[kept - 1].key == t->names[i].key)
            free(t->names[i].name);
        else
            t->names[kept++] = t->names[i];
    }
    t->name_count = kept;
    t->names_sorted = true;
}

/* --- writing ------------------------------------------------------------------------------------- */

/* Length of the UTF-8 sequence at s; 0 if it is none. */
static size_t timeline_utf8(const unsigned char *s)
{
    size_t n = s[0] < 0x80 ? 1 : s[0] >= 0xc2 && s[0] < 0xe0 ? 2 : s[0] >= 0xe0 && s[0] < 0xf0 ? 3 : 4;
    if (s[0] > 0xf4 || (s[0] >= 0x80 && s[0] < 0xc2))
        return 0;
    for (size_t i = 1; i < n; i++)
        if ((s[i] & 0xc0) != 0x80)
            return 0;
    bool overlong = (s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xf0 && s[1] < 0x90);
    bool beyond = (s[0] == 0xed && s[1] > 0x9f) || (s[0] == 0xf4 && s[1] > 0x8f);
    return overlong || beyond ? 0 : n;
}

static void timeline_write_text(FILE *out, const char *text)
{
    putc('"', out);
    for (const unsigned char *s = (const unsigned char *)text; *s;) {
        size_t n = timeline_utf8(s);
        if (n == 0) {
            putc('?', out); /* no text in any JSON */
            n = 1;
        } else if (*s == '"' || *s == '\\') {
            fprintf(out, "\\%c", *s);
        } else if (*s < 0x20) {
            fprintf(out, "\\u%04x", *s);
        } else {
            fwrite(s, 1, n, out);
        }
        s += n;
    }
    putc('"', out);
}

/* Microseconds, to the nanosecond. */
static void timeline_write_time(FILE *out, const char *field, int64_t ns)
{
    fprintf(out, ",\"%s\":%" PRId64 ".%03d", field, ns / 1000, (int)(ns % 1000));
}

/* One for each rank, service, and service that has had the same place before. */
static uint32_t timeline_find_pid(const struct tly_timeline *t, size_t i)
{
    const struct tly_process *p = &t->processes[i], *q = t->processes;
    uint32_t life = p->service;
    for (; q < p; q++)
        life += q->service == p->service && q->index == p->index;
    return 1 + p->index + life * LIFE_PID;
}

static void timeline_write_meta(FILE *out, const struct tly_process *p, const char *name)
{
    fprintf(out, "{\"ph\":\"M\",\"pid\":%u,\"name\":\"%s\"", p->pid, name);
}

static void timeline_write_head(FILE *out, const struct tly_process *p)
{
    char title[128];
    timeline_write_meta(out, p, "tally_process");
    fprintf(out, ",\"args\":{\"format\":%d,\"service\":%d,\"index\":%u", TLY_TIMELINE_FORMAT, p->service,
            p->index);
    if (p->rank != TLY_NO_PEER)
        fprintf(out, ",\"rank\":%u", p->rank);
    fprintf(out, ",\"job\":");
    timeline_write_text(out, p->job);
    fprintf(out, ",\"host\":");
    timeline_write_text(out, p->host);
    fprintf(out, ",\"machine\":");
    timeline_write_text(out, p->machine);
    fprintf(out, ",\"clock\":");
    timeline_write_text(out, p->clock);
    fprintf(out,
            ",\"start\":\"%016" PRIx64 "\",\"incarnation\":\"%016" PRIx64 "\",\"from_ns\":%" PRId64
            ",\"to_ns\":%" PRId64 ",\"lost\":%" PRIu64 ",\"offset_ns\":%" PRId64 ",\"error_ns\":%" PRId64
            "}},\n",
            p->start, p->incarnation, p->from, p->to, p->lost, p->offset, p->error);
    tly_process_title(p, title, sizeof title);
    timeline_write_meta(out, p, "process_name");
    fprintf(out, ",\"args\":{\"name\":");
    timeline_write_text(out, title);
    fprintf(out, "}},\n");
    timeline_write_meta(out, p, "process_sort_index");
    fprintf(out, ",\"args\":{\"sort_index\":%u}},\n", p->pid);
}

static void timeline_label(const struct tly_timeline *t, const struct tly_slice *s, char *out, size_t len)
{
    struct tly_name want = {.key = s->key};
    const struct tly_name *n =
        t->name_count ? bsearch(&want, t->names, t->name_count, sizeof want, timeline_by_key) : NULL;
    char hex[20];
    snprintf(hex, sizeof hex, "%016" PRIx64, s->key);
    if (s->part == TLY_NO_PART)
        snprintf(out, len, "%s", n ? n->name : hex);
    else
        snprintf(out, len, "%s[%u]", n ? n->name : hex, s->part);
}

static void timeline_row_title(const struct tly_slice *s, char *out, size_t len)
{
    if (tly_rows[s->row].peer)
        snprintf(out, len, "%s %s %u", tly_rows[s->row].name, tly_rows[s->row].peer, s->peer);
    else
        snprintf(out, len, "%s", tly_rows[s->row].name);
}

/* The slices of one row and peer; sorted. */
static void timeline_write_row(FILE *out, const struct tly_timeline *t, const struct tly_process *p,
                               const struct tly_slice *s, size_t count, uint32_t *row_number, uint64_t *id)
{
    int64_t end[LANES];
    uint32_t lanes = 0, first = *row_number;
    bool waits = tly_rows[s->row].waits;
    char text[TLY_TIMELINE_NAME + 16], title[64];
    timeline_row_title(s, title, sizeof title);
    for (size_t i = 0; i < count; i++, s++) {
        uint32_t lane = 0;
        while (lane < lanes && end[lane] > s->from)
            lane++;
        if (lane == lanes && lanes < LANES && !waits) {
            timeline_write_meta(out, p, "thread_name");
            fprintf(out, ",\"tid\":%u,\"args\":{\"name\":\"%s\"}},\n", first + lane, title);
            timeline_write_meta(out, p, "thread_sort_index");
            fprintf(out, ",\"tid\":%u,\"args\":{\"sort_index\":%u}},\n", first + lane, first + lane);
            lanes++;
        }
        lane = lane < LANES ? lane : LANES - 1;
        end[lane] = s->to;
        timeline_label(t, s, text, sizeof text);
        fprintf(out, "{\"ph\":\"%c\",\"pid\":%u,\"tid\":%u", waits ? 'b' : 'X', p->pid,
                waits ? 0 : first + lane);
        timeline_write_time(out, "ts", s->from);
        timeline_write_time(out, "dur", s->to - s->from);
        fprintf(out, ",\"name\":");
        timeline_write_text(out, waits ? title : text);
        fprintf(out, ",\"cat\":\"%s\",\"args\":{", tly_rows[s->row].name);
        if (waits) {
            fprintf(out, "\"tensor\":");
            timeline_write_text(out, text);
            putc(',', out);
        }
        fprintf(out, "\"key\":\"%016" PRIx64 "\",\"round\":%u", s->key, s->round);
        if (s->part != TLY_NO_PART)
            fprintf(out, ",\"part\":%u", s->part);
        if (s->peer != TLY_NO_PEER)
            fprintf(out, ",\"peer\":%u", s->peer);
        fprintf(out, ",\"bytes\":%u,\"open\":%d}", s->bytes, s->open);
        if (!waits) {
            fprintf(out, "},\n");
            continue;
        }
        fprintf(out, ",\"id2\":{\"local\":\"0x%" PRIx64 "\"}},\n", ++*id);
        fprintf(out, "{\"ph\":\"e\",\"pid\":%u,\"tid\":0", p->pid);
        timeline_write_time(out, "ts", s->to);
        fprintf(out, ",\"name\":\"%s\",\"cat\":\"%s\",\"id2\":{\"local\":\"0x%" PRIx64 "\"}},\n", title,
                tly_rows[s[0].row].name, *id);
    }
    *row_number += lanes;
}

int tly_timeline_write(FILE *out, struct tly_timeline *t)
{
    timeline_sort_names(t);
    fprintf(out, "{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n");
    for (size_t i = 0; i < t->count; i++) {
        struct tly_process *p = &t->processes[i];
        uint32_t row_number = 1;
        uint64_t id = 0;
        p->pid = timeline_find_pid(t, i);
        timeline_write_head(out, p);
        for (size_t n = 0; n < t->name_count && i == 0; n++) {
            timeline_write_meta(out, p, "tally_tensor");
            fprintf(out, ",\"args\":{\"key\":\"%016" PRIx64 "\",\"name\":", t->names[n].key);
            timeline_write_text(out, t->names[n].name);
            fprintf(out, "}},\n");
        }
        tly_process_sort(p, true);
        for (size_t from = 0, to; from < p->slice_count; from = to) {
            const struct tly_slice *s = &p->slices[from];
            for (to = from;
                 to < p->slice_count && p->slices[to].row == s->row && p->slices[to].peer == s->peer;)
                to++;
            timeline_write_row(out, t, p, s, to - from, &row_number, &id);
        }
        for (size_t n = 0; n < p->sample_count; n++) {
            fprintf(out, "{\"ph\":\"C\",\"pid\":%u", p->pid);
            timeline_write_time(out, "ts", p->samples[n].at);
            fprintf(out, ",\"name\":\"bytes in flight\",\"args\":{\"bytes\":%" PRIu64 "}},\n",
                    p->samples[n].bytes);
        }
        timeline_write_meta(out, p, "tally_end");
        fprintf(out, ",\"args\":{\"slices\":%zu,\"samples\":%zu}}%s\n", p->slice_count, p->sample_count,
                i + 1 < t->count ? "," : "");
    }
    fprintf(out, "]}\n");
    return ferror(out) ? -EIO : 0;
}
