/* read.c - reads the files of timeline.c back, line by line, and refuses everything else.  Only the command does that. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "trace/timeline.h"

enum { MOST_PROCESSES = 4096 };

void tly_timeline_leave_out(struct tly_timeline *t, size_t i)
{
    free(t->processes[i].slices);
    free(t->processes[i].samples);
    memmove(&t->processes[i], &t->processes[i + 1], (--t->count - i) * sizeof *t->processes);
}

/* A line, and how far it has been read.  What does not fit fails, and all that follows with it. */
struct scan {
    const char *at;
    bool failed;
};

static bool trace_read_starts(struct scan *s, const char *text)
{
    size_t len = strlen(text);
    if (s->failed || strncmp(s->at, text, len) != 0)
        return false;
    s->at += len;
    return true;
}

static void trace_read_expect(struct scan *s, const char *text)
{
    if (!trace_read_starts(s, text))
        s->failed = true;
}

static uint64_t trace_read_number(struct scan *s, uint64_t most)
{
    uint64_t x = 0;
    if (s->failed || *s->at < '0' || *s->at > '9')
        s->failed = true;
    for (; !s->failed && *s->at >= '0' && *s->at <= '9'; s->at++)
        if (__builtin_mul_overflow(x, 10u, &x) || __builtin_add_overflow(x, (uint64_t)(*s->at - '0'), &x) ||
            x > most)
            s->failed = true;
    return x;
}

/* A field that is there or not; `none`, the largest number of all, if it is not. */
static uint32_t trace_read_optional(struct scan *s, const char *field, uint32_t none)
{
    return trace_read_starts(s, field) ? (uint32_t)trace_read_number(s, none - 1) : none;
}

static int64_t trace_read_signed_number(struct scan *s)
{
    bool minus = trace_read_starts(s, "-");
    int64_t x = (int64_t)trace_read_number(s, INT64_MAX / 4);
    return minus ? -x : x;
}

static int64_t trace_read_time(struct scan *s)
{
    int64_t us = (int64_t)trace_read_number(s, INT64_MAX / 16000);
    trace_read_expect(s, ".");
    int64_t ns = 0;
    for (int i = 0; i < 3 && !s->failed; i++, s->at += !s->failed) {
        s->failed = *s->at < '0' || *s->at > '9';
        ns = ns * 10 + (*s->at - '0');
    }
    return s->failed ? 0 : us * 1000 + ns;
}

static int trace_read_hex_digit(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static uint64_t trace_read_hex(struct scan *s, int digits)
{
    uint64_t x = 0;
    for (int i = 0; i < digits && !s->failed; i++, s->at += !s->failed) {
        int d = trace_read_hex_digit(*s->at);
        s->failed = d < 0;
        x = x << 4 | (unsigned)d;
    }
    return x;
}

/* A string; what is too long for `out` is cut. */
static void trace_read_text(struct scan *s, char *out, size_t len)
{
    size_t at = 0;
    trace_read_expect(s, "\"");
    while (!s->failed && *s->at != '"') {
        char c = *s->at++;
        if (c == '\\' && (*s->at == '"' || *s->at == '\\')) {
            c = *s->at++;
        } else if (c == '\\') {
            trace_read_expect(s, "u00");
            c = (char)trace_read_hex(s, 2);
            s->failed |= c == 0; /* it would end the name */
        } else if ((unsigned char)c < 0x20) {
            s->failed = true; /* the end of the line, among others */
        }
        if (at + 1 < len)
            out[at++] = c;
    }
    trace_read_expect(s, "\"");
    if (len)
        out[at] = '\0';
}

static void trace_read_process(struct scan *s, struct tly_process *p)
{
    trace_read_expect(s, ",\"args\":{\"format\":");
    s->failed |= trace_read_number(s, UINT32_MAX) != TLY_TIMELINE_FORMAT;
    trace_read_expect(s, ",\"service\":");
    p->service = trace_read_number(s, 1);
    trace_read_expect(s, ",\"index\":");
    p->index = (uint32_t)trace_read_number(s, 999999);
    p->rank = trace_read_optional(s, ",\"rank\":", TLY_NO_PEER);
    trace_read_expect(s, ",\"job\":");
    trace_read_text(s, p->job, sizeof p->job);
    trace_read_expect(s, ",\"host\":");
    trace_read_text(s, p->host, sizeof p->host);
    trace_read_expect(s, ",\"machine\":");
    trace_read_text(s, p->machine, sizeof p->machine);
    trace_read_expect(s, ",\"clock\":");
    trace_read_text(s, p->clock, sizeof p->clock);
    trace_read_expect(s, ",\"start\":\"");
    p->start = trace_read_hex(s, 16);
    trace_read_expect(s, "\",\"incarnation\":\"");
    p->incarnation = trace_read_hex(s, 16);
    trace_read_expect(s, "\",\"from_ns\":");
    p->from = trace_read_signed_number(s);
    trace_read_expect(s, ",\"to_ns\":");
    p->to = trace_read_signed_number(s);
    trace_read_expect(s, ",\"lost\":");
    p->lost = trace_read_number(s, UINT64_MAX);
    trace_read_expect(s, ",\"offset_ns\":");
    p->offset = trace_read_signed_number(s);
    trace_read_expect(s, ",\"error_ns\":");
    p->error = trace_read_signed_number(s);
    trace_read_expect(s, "}}");
}

static enum tly_row trace_read_find_row(struct scan *s)
{
    for (int i = 0; i < TLY_ROWS; i++)
        if (trace_read_starts(s, tly_rows[i].name))
            return (enum tly_row)i;
    s->failed = true;
    return 0;
}

static void trace_read_slice(struct scan *s, const struct tly_process *p, struct tly_slice *out)
{
    trace_read_expect(s, ",\"tid\":");
    trace_read_number(s, UINT32_MAX);
    trace_read_expect(s, ",\"ts\":");
    out->from = trace_read_time(s);
    trace_read_expect(s, ",\"dur\":");
    out->to = out->from + trace_read_time(s);
    trace_read_expect(s, ",\"name\":");
    trace_read_text(s, NULL, 0);
    trace_read_expect(s, ",\"cat\":\"");
    out->row = (uint8_t)trace_read_find_row(s);
    s->failed |= tly_rows[out->row].service != p->service;
    trace_read_expect(s, "\",\"args\":{");
    if (trace_read_starts(s, "\"tensor\":")) {
        trace_read_text(s, NULL, 0);
        trace_read_expect(s, ",");
    }
    trace_read_expect(s, "\"key\":\"");
    out->key = trace_read_hex(s, 16);
    trace_read_expect(s, "\",\"round\":");
    out->round = (uint32_t)trace_read_number(s, UINT32_MAX);
    out->part = trace_read_optional(s, ",\"part\":", TLY_NO_PART);
    out->peer = trace_read_optional(s, ",\"peer\":", TLY_NO_PEER);
    trace_read_expect(s, ",\"bytes\":");
    out->bytes = (uint32_t)trace_read_number(s, UINT32_MAX);
    trace_read_expect(s, ",\"open\":");
    out->open = trace_read_number(s, 1);
    trace_read_expect(s, "}");
    if (tly_rows[out->row].waits) {
        trace_read_expect(s, ",\"id2\":{\"local\":\"0x");
        while (trace_read_hex_digit(*s->at) >= 0)
            s->at++;
        trace_read_expect(s, "\"}");
    }
    trace_read_expect(s, "}");
}

enum trace_read_line { LINE_HEAD, LINE_NAME, LINE_SLICE, LINE_SAMPLE, LINE_END, LINE_SKIPPED };

struct trace_read_reading {
    struct tly_timeline *t;
    struct tly_process *p; /* whose section it is; NULL between sections */
    bool out_of_memory;
};

static void trace_read_line(struct scan *s, struct trace_read_reading *r)
{
    struct tly_slice slice = {0};
    struct tly_sample sample = {0};
    struct tly_process *p = r->p;
    char name[TLY_TIMELINE_NAME];
    trace_read_expect(s, "{\"ph\":\"");
    char type = *s->at;
    s->at += type != '\0';
    trace_read_expect(s, "\",\"pid\":");
    uint32_t pid = (uint32_t)trace_read_number(s, UINT32_MAX);
    if (type == 'M' && trace_read_starts(s, ",\"name\":\"tally_process\"")) {
        if (p || r->t->count >= MOST_PROCESSES) {
            s->failed = true;
            return;
        }
        r->p = p = tly_timeline_add(r->t);
        r->out_of_memory |= !p;
        if (p) {
            p->pid = pid;
            trace_read_process(s, p);
        }
    } else if (type == 'M' && p && trace_read_starts(s, ",\"name\":\"tally_tensor\",\"args\":{\"key\":\"")) {
        uint64_t key = trace_read_hex(s, 16);
        trace_read_expect(s, "\",\"name\":");
        trace_read_text(s, name, sizeof name);
        trace_read_expect(s, "}}");
        if (!s->failed)
            r->out_of_memory |= tly_timeline_name(r->t, key, name) != 0;
    } else if (type == 'M' && p && trace_read_starts(s, ",\"name\":\"tally_end\",\"args\":{\"slices\":")) {
        s->failed |= trace_read_number(s, UINT64_MAX) != p->slice_count;
        trace_read_expect(s, ",\"samples\":");
        s->failed |= trace_read_number(s, UINT64_MAX) != p->sample_count;
        trace_read_expect(s, "}}");
        r->p = NULL;
    } else if ((type == 'X' || type == 'b') && p) {
        trace_read_slice(s, p, &slice);
        if (!s->failed)
            r->out_of_memory |= tly_timeline_slice(p, &slice) != 0;
    } else if (type == 'C' && p) {
        trace_read_expect(s, ",\"ts\":");
        sample.at = trace_read_time(s);
        trace_read_expect(s, ",\"name\":\"bytes in flight\",\"args\":{\"bytes\":");
        sample.bytes = trace_read_number(s, UINT64_MAX);
        trace_read_expect(s, "}}");
        if (!s->failed)
            r->out_of_memory |= tly_timeline_sample(p, &sample) != 0;
    } else if ((type == 'M' && p &&
                (trace_read_starts(s, ",\"name\":\"process_") ||
                 trace_read_starts(s, ",\"name\":\"thread_"))) ||
               (type == 'e' && p)) {
        while (*s->at && strcmp(s->at, ",") != 0) /* for the viewer alone */
            s->at++;
    } else {
        s->failed = true;
    }
    if (p && pid != p->pid)
        s->failed = true;
}

int tly_timeline_read(FILE *in, struct tly_timeline *t, char *why, size_t why_len)
{
    static const char head[] = "{\"displayTimeUnit\":\"ns\",\"traceEvents\":[";
    static const char cut_off[] =
        "is cut off: copy the file again; if the original is no longer, its disk was full";
    struct trace_read_reading r = {.t = t};
    char *line = NULL;
    size_t room = 0, before = t->count;
    unsigned long count = 0;
    bool more = true, ended = false; /* more: the last line ended with a comma, or was the first */
    ssize_t len;
    int err = 0;
    while (!err && (len = getline(&line, &room, in)) >= 0) {
        struct scan s = {line, strlen(line) != (size_t)len};
        count++;
        if (len && line[len - 1] == '\n')
            line[--len] = '\0';
        else
            s.failed = true;
        if (count == 1) {
            if (s.failed && feof(in) && strncmp(line, head, (size_t)len) == 0)
                err = -ENODATA;
            else if (strcmp(line, head) != 0)
                err = -EINVAL;
            if (err)
                snprintf(why, why_len, "%s", err == -ENODATA ? cut_off : "is no trace of Tally's");
            continue;
        }
        if (!ended && !more && !r.p && strcmp(line, "]}") == 0) {
            ended = true;
            continue;
        }
        s.failed |= ended || !more || len == 0;
        if (!s.failed)
            trace_read_line(&s, &r);
        more = trace_read_starts(&s, ",");
        s.failed |= *s.at != '\0' || (r.p && !more);
        if (s.failed || r.out_of_memory) {
            err = r.out_of_memory ? -ENOMEM : feof(in) ? -ENODATA : -EINVAL;
            if (err == -ENODATA)
                snprintf(why, why_len, "%s", cut_off);
            else
                snprintf(why, why_len, "line %lu is %s", count,
                         err == -ENOMEM ? "too many: out of memory" : "not as Tally writes it");
        }
    }
    free(line);
    if (!err && (ferror(in) || !ended || t->count == before)) {
        err = ferror(in) ? -EINVAL : -ENODATA;
        snprintf(why, why_len, "%s",
                 ferror(in)   ? "cannot be read"
                 : count == 0 ? "is empty: its process ended before it wrote, or its disk was full"
                              : cut_off);
    }
    return err;
}
