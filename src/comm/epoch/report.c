/* report.c - what the communicator and its services have done, as JSON. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/event.h"
#include "base/loop.h"
#include "base/thread.h"
#include "comm/comm.h"
#include "comm/epoch/epoch.h"
#include "comm/epoch/pace.h"
#include "comm/path/engine.h"
#include "comm/path/peer.h"
#include "membership/roster.h"
#include "membership/status.h"
#include "tally/tally.h"
#include "wire/frame.h"
#include "wire/hello.h"

/* Ask each service that is connected; where none is, there is nothing to wait for. */
static void report_ask(tally_comm *c, struct tly_event *done)
{
    struct tly_frame f = {.type = TLY_STATUS, .rank = (uint32_t)c->rank};
    c->reports.missing = 0;
    c->reports.done = done;
    for (int i = 0; i < c->services; i++) {
        c->peers[i].reported = !c->peers[i].link;
        if (c->peers[i].link) {
            c->reports.missing++;
            tly_peer_post(&c->peers[i], &f, NULL, 0);
        }
    }
    if (!c->reports.missing)
        tly_event_set(done);
}

/* Not known is 0, and null to the reader. */
static void report_write_number(FILE *out, const char *name, double x)
{
    if (x > 0)
        fprintf(out, "\"%s\": %.9g, ", name, x);
    else
        fprintf(out, "\"%s\": null, ", name);
}

static void report_write_json(const tally_comm *c, FILE *out)
{
    uint64_t total = 0, ops, bytes;
    int tallyds = 0;
    tly_comm_count(c, &ops, &bytes);
    for (int i = 0; i < c->epoch->services; i++) {
        total += c->epoch->listed[i];
        tallyds += i >= c->machines && c->epoch->incarnation[i];
    }
    fprintf(out,
            "{\"version\": \"%s\", \"rank\": %d, \"size\": %d, \"machines\": %d, \"tallyd\": %d, "
            "\"part_bytes\": %u, "
            "\"credit_bytes\": %" PRIu64 ", \"operations\": %" PRIu64 ", \"bytes\": %" PRIu64
            ", \"cpu_s\": %.6f, ",
            TALLY_VERSION, c->rank, c->size, c->machines, tallyds, c->epoch->part_bytes,
            c->epoch->credit_bytes, ops, bytes, (double)tly_thread_cpu() / TLY_SEC);
    report_write_number(out, "predicted_s_per_gb", tly_pace_predicted(&c->pace) * 1e9);
    report_write_number(out, "reached_s_per_gb", tly_pace_reached(c) * 1e9);
    fprintf(out, "\"services\": [");
    for (int i = 0; i < c->epoch->services; i++) {
        const struct tly_roster_service *s = &c->member.roster.services[i];
        const uint64_t *v = c->peers[i].report;
        char address[TLY_HOST_TEXT];
        uint32_t port = tly_endpoints_host(&s->at, address);
        if (!c->epoch->incarnation[i])
            continue; /* nobody has this place */
        fprintf(out, "%s{\"kind\": \"%s\", \"address\": \"%s\", \"port\": %u, ", i ? ", " : "",
                s->role == TLY_ROLE_RANK ? "embedded" : "tallyd", address, port);
        report_write_number(out, "bandwidth_bits_per_s", (double)s->bandwidth);
        report_write_number(out, "current_bits_per_s",
                            (double)tly_current(&c->member.current, &c->member.roster, (uint32_t)i));
        report_write_number(out, s->measured ? "measured_bits_per_s" : "declared_bits_per_s",
                            (double)s->said);
        fprintf(out,
                "\"share\": %.9g, \"bytes_summed\": "
                "%" PRIu64 ", \"parts_summed\": %" PRIu64 ", \"rounds_open\": %" PRIu64
                ", \"bytes_in_use\": %" PRIu64 ", \"bytes_peak\": %" PRIu64 ", \"memory_limit\": %" PRIu64
                ", \"slots_dropped\": %" PRIu64 "}",
                (double)c->epoch->listed[i] / (double)total, v[0], v[1], v[2], v[3], v[4], v[5], v[6]);
    }
    fprintf(out, "]}");
}

int tally_comm_report(tally_comm *c, int timeout_ms, char **json)
{
    struct tly_event done = {0};
    int err = tly_comm_check(c);
    if (err)
        return err;
    tly_loop_lock(&c->loop);
    if (c->reports.done) {
        tly_loop_unlock(&c->loop);
        return tly_fail(EBUSY, "another thread is asking for a report: ask again when it has one");
    }
    report_ask(c, &done);
    tly_loop_unlock(&c->loop);
    tly_loop_wake(&c->loop);
    bool came = tly_event_wait(&done, timeout_ms < 0 ? -1 : tly_now() + timeout_ms * TLY_MS);
    char *text = NULL;
    size_t len;
    FILE *out = open_memstream(&text, &len);
    tly_loop_lock(&c->loop);
    c->reports.done = NULL;
    const char *silent = "a service";
    for (int i = 0; i < c->services; i++)
        if (!c->peers[i].reported)
            silent = c->peers[i].name;
    if (out)
        report_write_json(c, out);
    tly_loop_unlock(&c->loop);
    if (out)
        fclose(out);
    if (!came || !text) {
        free(text);
        return came ? tly_fail(ENOMEM, "out of memory")
                    : tly_fail(ETIMEDOUT, "no report from %s within %d ms: ask with a longer time-out",
                               silent, timeout_ms);
    }
    err = tly_comm_check(c);
    if (err) {
        free(text);
        return err;
    }
    *json = text;
    return 0;
}
