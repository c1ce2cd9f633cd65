/* run_output.c - the output of `tally run`: a prefix before each line of a rank or tallyd, and our own messages.
 *
 * Each child has two streams, the reading ends of its pipes.  A stream collects bytes until a line is whole and adds the
 * line with its prefix to a sink.  From the first line of a Python traceback on it holds its lines back until none has
 * come for a while, so that the tracebacks of ranks that fail together stand one behind the other.  If another rank has
 * just had the same one, a line says so instead.  There are two sinks: our stdout and our stderr.  A sink keeps what has not been
 * written yet.  While a sink holds something, the guard reads none of its streams, so a reader that is stuck slows the
 * children down and costs little memory.
 *
 * Only the guard touches streams and sinks. */
#include <ctype.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "cli/cli.h"
#include "cli/run.h"

enum { LONGEST_LINE = 1 << 20, CHUNK = 4096, MOST_HELD = 1 << 20 };
#define QUIET (500 * TLY_MS)  /* a traceback has ended */
#define LONGEST (5 * TLY_SEC) /* and what has gone on for so long was none */
#define LATELY (10 * TLY_SEC) /* tracebacks are compared */

static void *output_grown(void *data, size_t *room, size_t need)
{
    if (need <= *room)
        return data;
    size_t more = *room ? *room : 512;
    while (more < need)
        more *= 2;
    void *p = realloc(data, more);
    if (!p) {
        fprintf(stderr, "tally run: out of memory\n");
        _exit(CLI_FAILED); /* the front ends the children */
    }
    *room = more;
    return p;
}

static void output_sink_add(struct tly_run_sink *s, const char *data, size_t len)
{
    if (s->fd < 0)
        return;
    if (s->at == s->len)
        s->at = s->len = 0;
    s->data = output_grown(s->data, &s->room, s->len + len);
    memcpy(s->data + s->len, data, len);
    s->len += len;
}

bool tly_run_sink_busy(const struct tly_run_sink *s)
{
    return s->fd >= 0 && s->at < s->len;
}

int tly_run_sink_write(struct tly_run_sink *s)
{
    size_t len = s->len - s->at;
    ssize_t n = write(s->fd, s->data + s->at, len < CHUNK ? len : CHUNK);
    if (n < 0) {
        if (errno == EINTR || errno == EAGAIN)
            return 0;
        s->fd = -1;
        return -errno;
    }
    s->at += (size_t)n;
    return 0;
}

void tly_run_say(struct tly_run_job *job, const char *format, ...)
{
    char text[1024] = "tally run: ";
    va_list args;
    va_start(args, format);
    int len = 11 + vsnprintf(text + 11, sizeof text - 12, format, args);
    va_end(args);
    if (len > (int)sizeof text - 2)
        len = sizeof text - 2;
    text[len++] = '\n';
    output_sink_add(&job->err, text, (size_t)len);
}

const char *tly_run_title(const struct tly_run_child *c, char buf[32])
{
    snprintf(buf, 32, "%s %d", c->server ? "tallyd" : "rank", c->index);
    return buf;
}

static void output_pass_line(const struct tly_run_child *c, struct tly_run_stream *s, const char *line,
                             size_t len)
{
    char name[32], prefix[40];
    int n = snprintf(prefix, sizeof prefix, "[%s] ", tly_run_title(c, name));
    output_sink_add(s->sink, prefix, (size_t)n);
    output_sink_add(s->sink, line, len);
    if (line[len - 1] != '\n')
        output_sink_add(s->sink, "\n", 1);
}

/* The length of PyTorch's "[rank3]: " at the beginning of a line. */
static size_t output_torch_prefix(const char *line, size_t len)
{
    size_t at = 5;
    if (len < 9 || memcmp(line, "[rank", at) != 0)
        return 0;
    while (at < len && isdigit((unsigned char)line[at]))
        at++;
    return at + 3 <= len && memcmp(line + at, "]: ", 3) == 0 ? at + 3 : 0;
}

/* The child that has just had the same lines; NULL: none, and they are noted. */
static const struct tly_run_child *output_seen_of(const struct tly_run_child *c, struct tly_run_stream *s,
                                                  int64_t now)
{
    enum { MOST = sizeof s->sink->seen / sizeof *s->sink->seen };
    uint64_t hash = 0xcbf29ce484222325u; /* FNV-1a */
    for (size_t i = 0; i < s->held_len; i++) {
        if (!i || s->held[i - 1] == '\n')
            i += output_torch_prefix(s->held + i, s->held_len - i);
        if (i < s->held_len)
            hash = (hash ^ (unsigned char)s->held[i]) * 0x100000001b3u;
    }
    for (int i = 0; i < MOST; i++) {
        const struct tly_run_seen *seen = &s->sink->seen[i];
        if (seen->child && seen->child != c && seen->hash == hash && now - seen->at < LATELY)
            return seen->child;
    }
    s->sink->seen[s->sink->seen_count++ % MOST] = (struct tly_run_seen){hash, now, c};
    return NULL;
}

static void output_pass_held(const struct tly_run_child *c, struct tly_run_stream *s, int64_t now)
{
    const struct tly_run_child *same = s->held_len ? output_seen_of(c, s, now) : NULL;
    char name[32], text[80];
    if (same) {
        int n = snprintf(text, sizeof text, "the same traceback as %s\n", tly_run_title(same, name));
        output_pass_line(c, s, text, (size_t)n);
        s->held_len = 0;
    }
    for (size_t at = 0, len; at < s->held_len; at += len) {
        const char *line = s->held + at, *newline = memchr(line, '\n', s->held_len - at);
        len = newline ? (size_t)(newline - line) + 1 : s->held_len - at;
        output_pass_line(c, s, line, len);
    }
    s->held_len = 0;
}

int64_t tly_run_stream_due(const struct tly_run_child *c, struct tly_run_stream *s, int64_t now)
{
    if (!s->held_len)
        return INT64_MAX;
    int64_t quiet = s->held_last + QUIET, longest = s->held_since + LONGEST;
    int64_t due = quiet < longest ? quiet : longest;
    if (due > now)
        return due;
    output_pass_held(c, s, now);
    return INT64_MAX;
}

static void output_take_line(const struct tly_run_child *c, struct tly_run_stream *s)
{
    static const char first[] = "Traceback (most recent call last):";
    int64_t now = tly_now();
    if (!s->held_len && memmem(s->line, s->len, first, sizeof first - 1))
        s->held_since = now;
    else if (!s->held_len) {
        output_pass_line(c, s, s->line, s->len);
        s->len = 0;
        return;
    }
    s->held = output_grown(s->held, &s->held_room, s->held_len + s->len);
    memcpy(s->held + s->held_len, s->line, s->len);
    s->held_len += s->len;
    s->held_last = now;
    s->len = 0;
    if (s->held_len >= MOST_HELD)
        output_pass_held(c, s, now);
}

void tly_run_stream_end(const struct tly_run_child *c, struct tly_run_stream *s)
{
    if (s->fd < 0)
        return;
    if (s->len)
        output_take_line(c, s);
    output_pass_held(c, s, tly_now());
    close(s->fd);
    s->fd = -1;
    free(s->line);
    free(s->held);
    s->line = s->held = NULL;
    s->room = s->held_room = 0;
}

bool tly_run_stream_read(const struct tly_run_child *c, struct tly_run_stream *s)
{
    char piece[16384];
    ssize_t n = read(s->fd, piece, sizeof piece);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return false;
    if (n <= 0) {
        tly_run_stream_end(c, s);
        return false;
    }
    for (char *at = piece, *end = piece + n; at < end;) {
        char *newline = memchr(at, '\n', (size_t)(end - at));
        size_t len = (size_t)((newline ? newline + 1 : end) - at);
        s->line = output_grown(s->line, &s->room, s->len + len);
        memcpy(s->line + s->len, at, len);
        s->len += len;
        if (newline || s->len >= LONGEST_LINE)
            output_take_line(c, s);
        at += len;
    }
    return true;
}
