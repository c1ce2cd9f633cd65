/* health.c - `tallyd --health`: /live, /ready and /metrics (Prometheus's text format 0.0.4) over HTTP/1.0.
 *
 * A request is read into a buffer of fixed size until its empty line; the answer is made at once, sent, and the
 * connection closed.  There are places for a few connections; each has 5 s, and if all are taken the one that has
 * lasted longest gives its place up.  So one that sends nothing, a byte a second, or without end, holds up nobody. */
#include "tallyd/health.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/fork.h"
#include "base/log.h"
#include "base/loop.h"
#include "base/thread.h"
#include "transport/address.h"

enum {
    PLACES = 16,
    PATIENCE_S = 5,
    READS = 16, /* of what comes behind a request */
};

/* Owner: the loop. */
struct visitor {
    struct tly_watch watch; /* fd -1: the place is free */
    struct tly_health *health;
    int64_t came; /* monotonic */
    size_t read, sent, answered;
    char request[TLY_HEALTH_REQUEST], answer[TLY_HEALTH_ANSWER];
};

struct tly_health {
    struct tly_loop loop;
    pthread_t thread;
    struct tly_watch door;
    bool resting; /* the door is not watched until the next tick; owner: the loop */
    struct tly_hook hook;
    struct visitor places[PLACES];

    pthread_mutex_t news_lock; /* guards what follows; held for a copy */
    struct tly_health_news news;
    int64_t told; /* monotonic */
};

/* --- what is answered ---------------------------------------------------------------------------- */

struct text {
    char *at;
    size_t len, room;
};

static void health_add(struct text *t, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void health_add(struct text *t, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    int n = vsnprintf(t->at + t->len, t->room - t->len, format, arguments);
    va_end(arguments);
    if (n > 0)
        t->len = (size_t)n < t->room - t->len ? t->len + (size_t)n : t->room - 1;
}

/* A label's value: backslash, quote and line feed are escaped. */
static void health_add_label(struct text *t, const char *value)
{
    for (; *value; value++)
        health_add(t, *value == '\n' ? "\\n" : *value == '\\' || *value == '"' ? "\\%c" : "%c", *value);
}

static void health_metric(struct text *t, const char *name, const char *type, const char *help,
                          uint64_t value)
{
    health_add(t, "# HELP tally_%s %s\n# TYPE tally_%s %s\ntally_%s %" PRIu64 "\n", name, help, name, type,
               name, value);
}

static void health_gauge(struct text *t, const char *name, const char *help, double value)
{
    health_add(t, "# HELP tally_%s %s\n# TYPE tally_%s gauge\ntally_%s %.6g\n", name, help, name, name,
               value);
}

static void health_metrics(struct text *t, const struct tly_health_news *n)
{
    const struct tly_service_facts *f = &n->facts;
    health_add(t, "# HELP tally_info The release and, while it serves or coordinates one, the job.\n# TYPE "
                  "tally_info gauge\n"
                  "tally_info{version=\"" TALLY_VERSION "\",job=\"");
    health_add_label(t, n->serving || n->coordinating ? n->job : "");
    health_add(t, "\"} 1\n");
    health_metric(t, "serving", "gauge", "1 while a job runs of which this is a service.", n->serving);
    health_metric(t, "jobs_total", "counter", "Jobs that have begun here.", n->jobs);
    health_metric(t, "ranks", "gauge", "Ranks of the job.", n->ranks);
    health_metric(t, "machines", "gauge", "Machines that the ranks are on.", n->machines);
    health_metric(t, "services", "gauge", "Summation services of the job.", n->services);
    health_metric(
        t, "epoch", "gauge",
        "The number of the split: it rises with each tallyd that comes or goes and each change of shares.",
        n->epoch);
    health_metric(t, "split_changed_timestamp_seconds", "gauge",
                  "When the split last changed, in seconds since 1970; 0: not yet.", n->changed);
    health_gauge(t, "share", "The part of all sums that the split gives to this service.", n->share);
    health_gauge(t, "card_current_bits_per_second",
                 "What its network card carries now, the plan's figure until it is seen; 0: not known.",
                 (double)n->current);
    health_gauge(t, "card_planned_bits_per_second", "What the split goes by for this card; 0: not known.",
                 (double)n->planned);
    health_gauge(t, "card_declared_bits_per_second", "What was declared of this card; 0: nothing.",
                 (double)n->declared);
    health_gauge(t, "card_measured_bits_per_second",
                 "What was measured of this card at the start; 0: nothing.", (double)n->measured);
    health_add(t, "# HELP tally_held_up 1 while somebody holds the job up; who, and by what.\n"
                  "# TYPE tally_held_up gauge\ntally_held_up{by=\"");
    health_add_label(t, n->slow.who);
    health_add(t, "\",why=\"%s\"} %d\n", tly_slow_why(&n->slow), n->slow.why != TLY_WHY_NOBODY);
    health_metric(t, "summed_bytes_total", "counter", "Bytes of sums made.",
                  n->before.bytes_summed + f->bytes_summed);
    health_metric(t, "summed_parts_total", "counter", "Parts summed.",
                  n->before.parts_summed + f->parts_summed);
    health_metric(t, "receive_bytes_total", "counter", "Bytes that came from ranks, headers too.",
                  n->before.bytes_received + f->bytes_received);
    health_metric(t, "transmit_bytes_total", "counter", "Bytes that went to ranks, headers too.",
                  n->before.bytes_sent + f->bytes_sent);
    health_add(t,
               "# HELP tally_cpu_seconds_total Processor time of this process.\n# TYPE "
               "tally_cpu_seconds_total counter\ntally_cpu_seconds_total %.3f\n",
               (double)n->cpu_us / 1e6);
    health_metric(t, "dropped_slots_total", "counter",
                  "Inputs dropped for want of memory and asked for again.",
                  n->before.slots_dropped + f->slots_dropped);
    health_metric(t, "open_rounds", "gauge", "Rounds of parts that have begun and that not all ranks have.",
                  f->rounds_open);
    health_metric(t, "memory_bytes", "gauge", "Memory taken for tensors.", f->bytes_in_use);
    health_metric(t, "memory_peak_bytes", "gauge", "The most that was taken, in this job.", f->bytes_peak);
    health_metric(t, "memory_limit_bytes", "gauge", "The most that may be taken.", f->memory_limit);
    health_gauge(t, "waiting_seconds", "How long the round that has waited longest has waited.",
                 (double)f->waiting_ms / 1e3);
}

/* The request's first word, and the second without a query; false: it is no request. */
static bool health_parse(const char *request, size_t len, char method[8], char path[32])
{
    const char *end = memchr(request, '\n', len), *at = request;
    size_t n = 0;
    if (!end)
        return false;
    for (; at < end && *at >= 'A' && *at <= 'Z' && n < 7; at++)
        method[n++] = *at;
    method[n] = '\0';
    if (n == 0 || at == end || *at++ != ' ' || at == end || *at != '/')
        return false;
    for (n = 0; at<end && * at> ' ' && *at <= '~' && *at != '?' && n < 31; at++)
        path[n++] = *at;
    path[n] = '\0';
    while (at<end && * at> ' ' && *at <= '~') /* the rest of a long path, or a query */
        at++;
    return end - at > 6 && memcmp(at, " HTTP/", 6) == 0;
}

/* A line without anything ends a request. */
static bool health_ended(const char *request, size_t len)
{
    for (size_t i = 1; i < len; i++)
        if (request[i] == '\n' &&
            (request[i - 1] == '\n' || (i > 1 && request[i - 1] == '\r' && request[i - 2] == '\n')))
            return true;
    return false;
}

size_t tly_health_answer(const char *request, size_t len, const struct tly_health_news *news, double age_s,
                         char out[TLY_HEALTH_ANSWER])
{
    char method[8], path[32], body_room[TLY_HEALTH_ANSWER - 256];
    struct text body = {body_room, 0, sizeof body_room}, all = {out, 0, TLY_HEALTH_ANSWER};
    const char *status = "200 OK", *type = "text/plain; charset=utf-8";
    body_room[0] = '\0';
    if (!health_ended(request, len)) {
        if (len < TLY_HEALTH_REQUEST)
            return 0;
        status = "431 Request Header Fields Too Large";
        health_add(&body, "too long\n");
    } else if (!health_parse(request, len, method, path)) {
        status = "400 Bad Request";
        health_add(&body, "no HTTP\n");
    } else if (strcmp(method, "GET") != 0 && strcmp(method, "HEAD") != 0) {
        status = "405 Method Not Allowed";
        health_add(&body, "GET or HEAD\n");
    } else if (strcmp(path, "/live") == 0) {
        bool alive = age_s < TLY_HEALTH_ALIVE_S;
        status = alive ? status : "503 Service Unavailable";
        health_add(&body, "last turn of the main thread %.1f s ago\n", age_s);
    } else if (strcmp(path, "/ready") == 0) {
        bool ready = (news->serving || news->coordinating) && age_s < TLY_HEALTH_ALIVE_S;
        status = ready ? status : "503 Service Unavailable";
        if (ready)
            health_add(&body, "%s job '%s'\n", news->serving ? "serving" : "coordinating", news->job);
        else
            health_add(&body, "waiting for a job\n");
    } else if (strcmp(path, "/metrics") == 0) {
        type = "text/plain; version=0.0.4; charset=utf-8";
        health_metrics(&body, news);
    } else {
        status = "404 Not Found";
        health_add(&body, "/live, /ready or /metrics\n");
    }
    health_add(&all, "HTTP/1.0 %s\r\nContent-Type: %s\r\nContent-Length: %zu\r\nConnection: close\r\n%s\r\n",
               status, type, body.len, status[0] == '4' && status[2] == '5' ? "Allow: GET, HEAD\r\n" : "");
    bool head = health_ended(request, len) && len >= 5 && memcmp(request, "HEAD ", 5) == 0;
    if (!head)
        health_add(&all, "%s", body.at);
    return all.len;
}

/* --- connections --------------------------------------------------------------------------------- */

static void health_leave(struct visitor *v)
{
    tly_loop_remove(&v->health->loop, &v->watch);
    tly_fd_close(v->watch.fd);
    v->watch.fd = -1;
}

static void health_answer(struct visitor *v)
{
    struct tly_health *h = v->health;
    pthread_mutex_lock(&h->news_lock);
    struct tly_health_news news = h->news;
    double age_s = (double)(tly_now() - h->told) / TLY_SEC;
    pthread_mutex_unlock(&h->news_lock);
    v->answered = tly_health_answer(v->request, v->read, &news, age_s, v->answer);
    if (v->answered)
        tly_loop_change(&h->loop, &v->watch, EPOLLOUT);
}

static void health_on_visitor(struct tly_watch *w, uint32_t events)
{
    struct visitor *v = tly_list_entry(w, struct visitor, watch);
    ssize_t n;
    if (!v->answered) {
        n = recv(w->fd, v->request + v->read, sizeof v->request - v->read, MSG_DONTWAIT);
        if (n > 0) {
            v->read += (size_t)n;
            health_answer(v);
        }
    } else {
        n = send(w->fd, v->answer + v->sent, v->answered - v->sent, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n > 0)
            v->sent += (size_t)n;
        if (v->sent == v->answered) {
            /* What it may still send would make of close() a reset, which takes the answer with it. */
            shutdown(w->fd, SHUT_WR);
            char rest[4096];
            for (int i = 0; i < READS && recv(w->fd, rest, sizeof rest, MSG_DONTWAIT) > 0; i++)
                ;
            health_leave(v);
            return;
        }
    }
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR))
        health_leave(v);
}

static void health_on_door(struct tly_watch *w, uint32_t events)
{
    struct tly_health *h = tly_list_entry(w, struct tly_health, door);
    int fd = tly_fd_own(accept4(w->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (fd < 0) {
        h->resting = true; /* without descriptors epoll would report the visitor again and again */
        tly_loop_change(&h->loop, &h->door, 0);
        return;
    }
    struct visitor *v = &h->places[0];
    for (int i = 0; i < PLACES && v->watch.fd >= 0; i++)
        if (h->places[i].watch.fd < 0 || h->places[i].came < v->came)
            v = &h->places[i];
    if (v->watch.fd >= 0)
        health_leave(v);
    v->health = h;
    v->came = h->loop.now;
    v->read = v->sent = v->answered = 0;
    v->watch = (struct tly_watch){.fd = fd, .ready = health_on_visitor};
    if (tly_loop_add(&h->loop, &v->watch, EPOLLIN) != 0) {
        tly_fd_close(fd);
        v->watch.fd = -1;
    }
}

static void health_tick(struct tly_hook *hook)
{
    struct tly_health *h = tly_list_entry(hook, struct tly_health, hook);
    for (int i = 0; i < PLACES; i++)
        if (h->places[i].watch.fd >= 0 && h->loop.now - h->places[i].came > PATIENCE_S * TLY_SEC)
            health_leave(&h->places[i]);
    if (h->resting) {
        h->resting = false;
        tly_loop_change(&h->loop, &h->door, EPOLLIN);
    }
}

/* --- life ---------------------------------------------------------------------------------------- */

int tly_health_parse(const char *where, struct sockaddr_storage *out)
{
    char local[32];
    bool port_alone = strspn(where, "0123456789") == strlen(where);
    if (port_alone)
        snprintf(local, sizeof local, "127.0.0.1:%.16s", where);
    if (tly_address_read(port_alone ? local : where, out) != 0)
        return tly_fail(EINVAL, "'%s' is no PORT or ADDRESS:PORT", where);
    return 0;
}

static void *health_run(void *arg)
{
    struct tly_health *h = arg;
    tly_loop_run(&h->loop);
    return NULL;
}

static int health_open_door(struct tly_health *h, const struct sockaddr_storage *at, const char *where)
{
    int one = 1, fd = tly_fd_own(socket(at->ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    h->door = (struct tly_watch){.fd = fd, .ready = health_on_door};
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) < 0 ||
        bind(fd, (const struct sockaddr *)at, tly_address_len(at)) < 0 || listen(fd, 64) < 0)
        return tly_fail(errno, "cannot listen at %s: %s", where, strerror(errno));
    return 0;
}

int tly_health_start(const char *where, struct tly_health **out)
{
    struct sockaddr_storage at;
    int err = tly_health_parse(where, &at);
    if (err)
        return err;
    struct tly_health *h = calloc(1, sizeof *h);
    if (!h)
        return tly_fail(ENOMEM, "out of memory");
    pthread_mutex_init(&h->news_lock, NULL);
    h->told = tly_now();
    h->door.fd = -1;
    h->hook = (struct tly_hook){.tick = health_tick};
    for (int i = 0; i < PLACES; i++)
        h->places[i].watch.fd = -1;
    err = tly_loop_init(&h->loop);
    if (err)
        goto fail;
    err = health_open_door(h, &at, where);
    if (err)
        goto fail_loop;
    tly_loop_lock(&h->loop);
    err = tly_loop_add(&h->loop, &h->door, EPOLLIN);
    tly_loop_hook(&h->loop, &h->hook);
    tly_loop_unlock(&h->loop);
    if (!err)
        err = tly_thread_start(&h->thread, "tally-health", health_run, h);
    if (err)
        goto fail_loop;
    *out = h;
    return 0;
fail_loop:
    tly_fd_close(h->door.fd);
    tly_loop_finish(&h->loop);
fail:
    pthread_mutex_destroy(&h->news_lock);
    free(h);
    return err;
}

void tly_health_tell(struct tly_health *h, const struct tly_health_news *news)
{
    pthread_mutex_lock(&h->news_lock);
    h->news = *news;
    h->told = tly_now();
    pthread_mutex_unlock(&h->news_lock);
}

void tly_health_stop(struct tly_health *h)
{
    if (!h)
        return;
    tly_loop_stop(&h->loop);
    pthread_join(h->thread, NULL);
    for (int i = 0; i < PLACES; i++)
        if (h->places[i].watch.fd >= 0)
            health_leave(&h->places[i]);
    tly_loop_remove(&h->loop, &h->door);
    tly_fd_close(h->door.fd);
    tly_loop_finish(&h->loop);
    pthread_mutex_destroy(&h->news_lock);
    free(h);
}
