/* run_output.c - the output of `tally run`: a prefix before each line of a rank or tallyd, and our own messages.
 *
 * Each child has two streams, the reading ends of its pipes.  A stream collects bytes until a line is whole and adds the
 * line with its prefix to a sink.  There are two sinks: our stdout and our stderr.  A sink keeps what has not been
 * written yet.  While a sink holds something, the guard reads none of its streams, so a reader that is stuck slows the
 * children down and costs little memory.
 *
 * Only the guard touches streams and sinks. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/cli.h"
#include "cli/run.h"

enum { LONGEST_LINE = 1 << 20, CHUNK = 4096 };

static void *grown(void *data, size_t *room, size_t need)
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

static void sink_add(struct tly_run_sink *s, const char *data, size_t len)
{
    if (s->fd < 0)
        return;
    if (s->at == s->len)
        s->at = s->len = 0;
    s->data = grown(s->data, &s->room, s->len + len);
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
    sink_add(&job->err, text, (size_t)len);
}

const char *tly_run_title(const struct tly_run_child *c, char buf[32])
{
    snprintf(buf, 32, "%s %d", c->server ? "tallyd" : "rank", c->index);
    return buf;
}

static void emit_line(const struct tly_run_child *c, struct tly_run_stream *s)
{
    char name[32], prefix[40];
    int len = snprintf(prefix, sizeof prefix, "[%s] ", tly_run_title(c, name));
    sink_add(s->sink, prefix, (size_t)len);
    sink_add(s->sink, s->line, s->len);
    if (s->line[s->len - 1] != '\n')
        sink_add(s->sink, "\n", 1);
    s->len = 0;
}

void tly_run_stream_end(const struct tly_run_child *c, struct tly_run_stream *s)
{
    if (s->fd < 0)
        return;
    if (s->len)
        emit_line(c, s);
    close(s->fd);
    s->fd = -1;
    free(s->line);
    s->line = NULL;
    s->room = 0;
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
        s->line = grown(s->line, &s->room, s->len + len);
        memcpy(s->line + s->len, at, len);
        s->len += len;
        if (newline || s->len >= LONGEST_LINE)
            emit_line(c, s);
        at += len;
    }
    return true;
}
