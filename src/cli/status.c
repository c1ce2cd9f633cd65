/* status.c - `tally status`: asks a coordinator how its job stands, then each service how much it has summed; or one
 * service alone.  All connections are proved like a rank's and live in one loop until a deadline. */
#include "cli/cli.h"

#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <signal.h>
#include <sodium.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/loop.h"
#include "membership/place.h"
#include "membership/status.h"
#include "sum/service.h"
#include "transport/address.h"
#include "transport/outbox.h"
#include "transport/transport.h"

const char tly_cli_status_usage[] =
    "usage: tally status [--json] [--timeout SECONDS] [HOST[:PORT]]\n"
    "\n"
    "Asks a job's coordinator, at rank 0's HOST, and all services.  Prints which ranks are there,\n"
    "missing or late, and how much each service has summed.  At the address of a service it asks\n"
    "only that service.  Without HOST the coordinator is that of TALLY_COORD or MASTER_ADDR.  It\n"
    "needs the job secret, and looks for it where ranks look.\n"
    "\n"
    "      --json             print JSON\n"
    "      --timeout SECONDS  wait so long for an answer (5)\n";

enum { LATE_MS = 1000 }; /* a round that waits for less is on its way */

/* One question to one process.  Owner: the loop, which this thread turns. */
struct query {
    struct tly_link *link; /* owned */
    struct tly_outbox outbox;
    struct tly_identity peer; /* who answered */
    bool started, done;
    bool from_coordinator;
    int err; /* errno; 0: there is an answer */
    char why[TLY_SENTENCE];
    struct tly_status status;       /* from_coordinator */
    struct tly_service_facts facts; /* else */
};

/* What is asked, for how long, and in whose name. */
struct asker {
    struct tly_loop loop;
    struct tly_identity identity;
    int64_t timeout_ns;
    struct sockaddr_storage named; /* the coordinator or service */
    char at[96];                   /* the same, for messages */
};

/* --- asking -------------------------------------------------------------------------------------- */

static void status_end(struct query *q, int err, const char *why)
{
    if (q->done)
        return;
    q->done = true;
    q->err = err;
    snprintf(q->why, sizeof q->why, "%s", why);
}

static void status_opened(void *user, struct tly_link *l)
{
    struct query *q = user;
    struct tly_frame f = {.type = TLY_STATUS};
    q->peer = *tly_link_peer(l);
    q->from_coordinator = q->peer.role == TLY_ROLE_COORDINATOR;
    if (!q->from_coordinator && q->peer.role != TLY_ROLE_SERVICE)
        status_end(q, EPROTO, "neither a coordinator nor a service");
    else if (tly_outbox_post(&q->outbox, &f, NULL, 0, NULL) != 0)
        status_end(q, ENOMEM, "out of memory");
}

static int status_header(void *user, struct tly_link *l, const struct tly_frame *f, struct tly_landing *land,
                         const char **why)
{
    land->control = true;
    return 0;
}

static int status_frame(void *user, struct tly_link *l, const struct tly_frame *f, void *data,
                        const char **why)
{
    struct query *q = user;
    struct tly_reader r = {data, f->payload, false};
    if (f->type == TLY_STATUS && !q->done) {
        int err =
            q->from_coordinator ? tly_status_read(&r, &q->status) : tly_service_facts_read(&r, &q->facts);
        status_end(q, -err, err ? "an answer that cannot be read" : "");
    } else if (f->type == TLY_VERDICT) {
        char sentence[TLY_SENTENCE];
        tly_read32(&r);
        tly_read_text(&r, sentence, sizeof sentence);
        status_end(q, ECANCELED, sentence);
    }
    return 0;
}

static bool status_next(void *user, struct tly_link *l, struct tly_outgoing *out)
{
    struct query *q = user;
    return tly_outbox_next(&q->outbox, out, NULL);
}

static void status_closed(void *user, struct tly_link *l, int err, const char *why)
{
    status_end(user, err, why);
}

static const struct tly_link_user calls = {.opened = status_opened,
                                           .header = status_header,
                                           .frame = status_frame,
                                           .next = status_next,
                                           .closed = status_closed};

static void status_start(struct asker *a, struct query *q, const struct tly_endpoints *to)
{
    struct tly_link_config c = {
        .user_calls = &calls, .user = q, .identity = a->identity, .peer_name = "status", .by_address = true};
    tly_outbox_init(&q->outbox);
    q->started = true;
    tly_loop_lock(&a->loop);
    int err = tly_link_dial(&a->loop, to, &c, &q->link);
    tly_loop_unlock(&a->loop);
    if (err)
        status_end(q, -err, strerror(-err));
}

static void status_wait_for(struct asker *a, struct query *q, size_t count)
{
    int64_t deadline = tly_now() + a->timeout_ns;
    for (size_t i = 0; i < count;) {
        if (!q[i].started || q[i].done)
            i++;
        else if (tly_now() < deadline)
            tly_loop_turn(&a->loop, 50);
        else
            status_end(&q[i], ETIMEDOUT, "no answer");
    }
}

static void status_finish(struct asker *a, struct query *q, size_t count)
{
    tly_loop_lock(&a->loop);
    for (size_t i = 0; i < count; i++) {
        if (!q[i].started)
            continue;
        tly_link_destroy(q[i].link);
        tly_outbox_finish(&q[i].outbox, NULL, NULL);
        tly_status_finish(&q[i].status);
    }
    tly_loop_unlock(&a->loop);
}

/* --- the job ------------------------------------------------------------------------------------- */

/* A service, and what it says. */
struct service {
    char name[64];
    struct tly_endpoints at;
    char address[TLY_HOST_TEXT]; /* of that, and `port` */
    const char *host;
    bool embedded;
    uint32_t rank, port;
    uint64_t
        current; /* bit/s each way that its card carries now: the plan's until it is seen; 0: not known */
    uint64_t bandwidth; /* what the split goes by; 0: not known */
    uint64_t said;      /* what was declared or, `measured`, found at the start; 0: not known */
    bool measured;
    double share; /* of all sums */
};

struct job {
    const struct query *coordinator;
    struct service *services; /* owned */
    struct query *answers;    /* owned; of each service */
    size_t service_count;
};

static void status_add_service(struct job *j, uint32_t role, uint32_t number, const char *host,
                               const struct tly_endpoints *at)
{
    struct service *s = &j->services[j->service_count++];
    *s = (struct service){.host = host, .embedded = role == TLY_ROLE_RANK, .rank = number, .at = *at};
    snprintf(s->name, sizeof s->name, s->embedded ? "rank %u" : "tallyd %u", number);
    s->port = tly_endpoints_host(at, s->address);
}

/* "::" is wherever the coordinator is. */
static void status_place_members(struct tly_status *s, const struct sockaddr_storage *coordinator)
{
    for (uint32_t i = 0; i < s->member_count; i++) {
        struct sockaddr_storage a;
        if (tly_endpoints_address(&s->members[i].at, &a) && tly_address_is_any(&a))
            tly_endpoints_place(&s->members[i].at, coordinator);
    }
}

/* Before there is a roster only tallyd are known to be services. */
static int status_list_services(struct job *j)
{
    const struct tly_status *s = &j->coordinator->status;
    const struct tly_roster *r = &s->roster;
    size_t most = s->has_roster ? r->service_count : s->member_count;
    j->services = calloc(most + 1, sizeof *j->services);
    j->answers = calloc(most + 1, sizeof *j->answers);
    if (!j->services || !j->answers)
        return -ENOMEM;
    uint32_t tallyd = 0;
    double total = 0;
    for (uint32_t i = 0; s->has_roster && i < r->service_count; i++)
        total += r->services[i].weight;
    for (uint32_t i = 0; s->has_roster && i < r->service_count; i++) {
        const struct tly_roster_service *x = &r->services[i];
        if (x->state == TLY_SERVICE_GONE)
            continue; /* nobody has this place */
        status_add_service(j, x->role, x->role == TLY_ROLE_RANK ? x->rank : i - r->machine_count, x->host,
                           &x->at);
        struct service *added = &j->services[j->service_count - 1];
        added->bandwidth = x->bandwidth;
        added->current = tly_current(&s->current, r, i);
        added->said = x->said;
        added->measured = x->measured;
        added->share = total > 0 ? x->weight / total : 0;
    }
    for (uint32_t i = 0; !s->has_roster && i < s->member_count; i++) {
        const struct tly_status_member *m = &s->members[i];
        if (m->role == TLY_ROLE_TALLYD)
            status_add_service(j, m->role, tallyd++, m->host, &m->at);
    }
    return 0;
}

static void status_ask_services(struct job *j, struct asker *a)
{
    for (size_t i = 0; i < j->service_count; i++) {
        struct sockaddr_storage to;
        const struct service *s = &j->services[i];
        if (tly_endpoints_address(&s->at, &to)) {
            status_start(a, &j->answers[i], &s->at);
        } else {
            j->answers[i].done = true;
            j->answers[i].err = EINVAL;
            snprintf(j->answers[i].why, sizeof j->answers[i].why, "no address");
        }
    }
    status_wait_for(a, j->answers, j->service_count);
}

static const struct tly_status_member *status_find_rank(const struct tly_status *s, uint32_t rank)
{
    for (uint32_t i = 0; i < s->member_count; i++)
        if (s->members[i].role == TLY_ROLE_RANK && s->members[i].rank == rank)
            return &s->members[i];
    return NULL;
}

static const char *status_stand_of(const struct tly_status *s, const struct tly_status_member *m)
{
    static const char *const words[] = {"joined", "proved", "connected", "left"};
    if (!m)
        return s->state < TLY_JOB_RUNNING ? "missing" : "gone";
    return m->stand == TLY_STAND_CONNECTED && s->state == TLY_JOB_RUNNING ? "running" : words[m->stand];
}

static const char *status_state_of(const struct tly_status *s)
{
    static const char *const words[] = {"gathering",  "proving machines", "measuring network cards",
                                        "connecting", "running",          "failed",
                                        "ended"};
    return words[s->state];
}

static uint32_t status_count_tallyd(const struct tly_status *s)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < s->member_count; i++)
        count += s->members[i].role == TLY_ROLE_TALLYD;
    return count;
}

/* --- as a table ---------------------------------------------------------------------------------- */

static const char *status_quantity(uint64_t bytes, char *out, size_t len)
{
    static const char *const units[] = {"B", "KB", "MB", "GB", "TB", "PB"};
    double x = (double)bytes;
    int unit = 0;
    for (; x >= 1000 && unit < 5; unit++)
        x /= 1000;
    snprintf(out, len, unit ? "%.2f %s" : "%.0f %s", x, units[unit]);
    return out;
}

static void status_print_missing(const struct tly_status *s)
{
    const char *before = "missing: rank ";
    for (uint32_t i = 0; i < s->size; i++) {
        if (status_find_rank(s, i))
            continue;
        uint32_t last = i;
        while (last + 1 < s->size && !status_find_rank(s, last + 1))
            last++;
        printf(last > i ? "%s%u-%u" : "%s%u", before, i, last);
        before = ", ";
        i = last;
    }
    if (before[0] == ',')
        putchar('\n');
    if (status_count_tallyd(s) < s->servers)
        printf("missing: %u of %u tallyd\n", s->servers - status_count_tallyd(s), s->servers);
}

static void status_print_facts(const struct query *q)
{
    char a[32], b[32], c[32], cpu[32] = "-";
    if (q->facts.bytes_summed)
        snprintf(cpu, sizeof cpu, "%.2f", (double)q->facts.cpu_us * 1e3 / (double)q->facts.bytes_summed);
    printf("%12s %12" PRIu64 " %6" PRIu64 " %10s %10s %8s",
           status_quantity(q->facts.bytes_summed, a, sizeof a), q->facts.parts_summed, q->facts.rounds_open,
           status_quantity(q->facts.bytes_in_use, b, sizeof b),
           status_quantity(q->facts.memory_limit, c, sizeof c), cpu);
}

/* Who is late and why, as far as one service can tell. */
static void status_print_late(const struct query *q, const char *name)
{
    if (!q->err && q->facts.waiting_ms >= LATE_MS)
        printf("late: an operation at %s has waited %.1f s for %s\n", name, (double)q->facts.waiting_ms / 1e3,
               q->facts.waits_for);
}

/* 5% and less is what a measurement errs by. */
static bool status_differs(double is, double from)
{
    return from > 0 && (is < .95 * from || is > 1.05 * from);
}

/* What the card carries now; what was said of it and what the split goes by, where that is something else. */
static const char *status_rate(const struct service *x, char *out, size_t len)
{
    double is = (double)x->current / 1e9, said = (double)x->said / 1e9, plan = (double)x->bandwidth / 1e9;
    if (!x->current)
        snprintf(out, len, "unknown");
    else if (status_differs(is, said))
        snprintf(out, len, "%.3g of %.3g Gbit/s (%s)", is, said, x->measured ? "measured" : "declared");
    else
        snprintf(out, len, "%.3g Gbit/s", is);
    size_t at = strlen(out);
    if (x->current && status_differs(is, plan))
        snprintf(out + at, len - at, ", the split goes by %.3g", plan);
    return out;
}

static void status_print_job(const struct job *j, const struct asker *a)
{
    const struct query *q = j->coordinator;
    const struct tly_status *s = &q->status;
    char network[120], in[32], out[32], slow[TLY_SENTENCE];
    printf("job '%s', start %016" PRIx64 ", coordinator %s: %s, %.0f s old\n", q->peer.job,
           q->peer.incarnation, a->at, status_state_of(s), (double)s->age_ms / 1e3);
    if (s->has_roster)
        printf("%u ranks on %u machines, %zu services; split no. %u, parts of %" PRIu64 " KB\n", s->size,
               s->roster.machine_count, j->service_count, s->roster.epoch, s->roster.part_bytes >> 10);
    else if (s->size)
        printf("%u ranks are expected\n", s->size);
    else
        printf("no rank has joined yet\n");
    tly_slow_text(&s->slow, slow, sizeof slow);
    if (slow[0])
        printf("held up by %s\n", slow);
    if (s->changed.at)
        printf("the split last changed at %s: %s\n", s->changed.when, s->changed.what);
    if (s->state < TLY_JOB_RUNNING)
        status_print_missing(s);
    if (s->size)
        printf("\n%6s %7s  %-16s %-24s %8s  %s\n", "rank", "machine", "host", "address", "process", "state");
    for (uint32_t i = 0; i < s->size; i++) {
        const struct tly_status_member *m = status_find_rank(s, i);
        char machine[16] = "-", address[TLY_HOST_TEXT] = "-";
        if (m)
            tly_endpoints_host(&m->at, address);
        if (s->has_roster)
            snprintf(machine, sizeof machine, "%u", s->roster.ranks[i].machine);
        printf("%6u %7s  %-16s %-24s %8u  %s\n", i, machine, m ? m->host : "-", address, m ? m->pid : 0,
               status_stand_of(s, m));
    }
    if (j->service_count)
        printf("\n%-12s %-16s %-30s %12s %12s %6s %10s %10s %8s %12s %12s %6s  %s\n", "service of", "host",
               "address", "summed", "parts", "open", "memory", "limit", "cpu s/GB", "received", "sent",
               "share", "bandwidth");
    for (size_t i = 0; i < j->service_count; i++) {
        const struct service *x = &j->services[i];
        char where[80];
        tly_address_compose(x->address, (uint16_t)x->port, where, sizeof where);
        printf("%-12s %-16s %-30s ", x->name, x->host, where);
        if (j->answers[i].err)
            printf("%12s: %s\n", "no answer", j->answers[i].why);
        else {
            const struct tly_service_facts *f = &j->answers[i].facts;
            status_print_facts(&j->answers[i]);
            printf(" %12s %12s %5.1f%%  %s\n", status_quantity(f->bytes_received, in, sizeof in),
                   status_quantity(f->bytes_sent, out, sizeof out), 100 * x->share,
                   status_rate(x, network, sizeof network));
        }
    }
    for (size_t i = 0; i < j->service_count; i++)
        status_print_late(&j->answers[i], j->services[i].name);
}

static void status_print_service(const struct query *q, const char *at)
{
    printf("a service of job '%s', start %016" PRIx64 ", at %s\n\n%12s %12s %6s %10s %10s %8s\n", q->peer.job,
           q->peer.incarnation, at, "summed", "parts", "open", "memory", "limit", "cpu s/GB");
    status_print_facts(q);
    putchar('\n');
    status_print_late(q, "it");
}

/* --- as JSON ------------------------------------------------------------------------------------- */

static void status_json_text(const char *name, const char *value, const char *end)
{
    printf("\"%s\": ", name);
    tly_json_text(stdout, value);
    fputs(end, stdout);
}

static void status_json_facts(const struct tly_service_facts *f)
{
    printf("\"bytes_summed\": %" PRIu64 ", \"parts_summed\": %" PRIu64 ", \"rounds_open\": %" PRIu64
           ", \"bytes_in_use\": %" PRIu64 ", \"bytes_peak\": %" PRIu64 ", \"memory_limit\": %" PRIu64
           ", \"slots_dropped\": %" PRIu64 ", \"bytes_received\": %" PRIu64 ", \"bytes_sent\": %" PRIu64
           ", \"cpu_s\": %.6f, \"waiting_s\": %.3f, ",
           f->bytes_summed, f->parts_summed, f->rounds_open, f->bytes_in_use, f->bytes_peak, f->memory_limit,
           f->slots_dropped, f->bytes_received, f->bytes_sent, (double)f->cpu_us / 1e6,
           (double)f->waiting_ms / 1e3);
    status_json_text("waits_for", f->waits_for, "");
}

static void status_json_start(const struct query *q, const char *what, const char *at)
{
    printf("{");
    status_json_text(what, at, ", ");
    status_json_text("job", q->peer.job, ", ");
    printf("\"start\": \"%016" PRIx64 "\", ", q->peer.incarnation);
}

static void status_json_ranks(const struct tly_status *s)
{
    const char *comma = "";
    printf("\"missing_ranks\": [");
    for (uint32_t i = 0; i < s->size; i++)
        if (!status_find_rank(s, i)) {
            printf("%s%u", comma, i);
            comma = ", ";
        }
    printf("], \"ranks\": [");
    for (uint32_t i = 0; i < s->size; i++) {
        const struct tly_status_member *m = status_find_rank(s, i);
        printf("%s\n  {\"rank\": %u, ", i ? "," : "", i);
        if (s->has_roster)
            printf("\"machine\": %u, ", s->roster.ranks[i].machine);
        if (m) {
            char address[TLY_HOST_TEXT];
            status_json_text("host", m->host, ", ");
            tly_endpoints_host(&m->at, address);
            status_json_text("address", address, ", ");
            printf("\"process\": %u, ", m->pid);
        }
        status_json_text("state", status_stand_of(s, m), "}");
    }
    printf("],\n");
}

static void status_json_job(const struct job *j, const struct asker *a)
{
    const struct tly_status *s = &j->coordinator->status;
    char slow[TLY_SENTENCE];
    tly_slow_text(&s->slow, slow, sizeof slow);
    status_json_start(j->coordinator, "coordinator", a->at);
    status_json_text("state", status_state_of(s), ", ");
    printf("\"age_s\": %.3f,\n\"size\": %u, ", (double)s->age_ms / 1e3, s->size);
    if (s->has_roster)
        printf("\"machines\": %u, \"epoch\": %u, \"part_bytes\": %" PRIu64 ", ", s->roster.machine_count,
               s->roster.epoch, s->roster.part_bytes);
    status_json_text("held_up_by", slow, ", ");
    status_json_text("held_up_why", tly_slow_why(&s->slow), ", ");
    status_json_text("split_changed", s->changed.what, ", ");
    if (s->changed.at)
        printf("\"split_changed_at\": %" PRIu64 ", ", s->changed.at);
    printf("\"tallyd\": %u, \"tallyd_expected\": %u, ", status_count_tallyd(s), s->servers);
    status_json_ranks(s);
    printf("\"services\": [");
    for (size_t i = 0; i < j->service_count; i++) {
        const struct service *x = &j->services[i];
        printf("%s\n  {\"kind\": \"%s\", ", i ? "," : "", x->embedded ? "embedded" : "tallyd");
        if (x->embedded)
            printf("\"rank\": %u, ", x->rank);
        status_json_text("host", x->host, ", ");
        status_json_text("address", x->address, ", ");
        if (x->current)
            printf("\"current_bits_per_s\": %" PRIu64 ", ", x->current);
        if (x->bandwidth)
            printf("\"bandwidth_bits_per_s\": %" PRIu64 ", ", x->bandwidth);
        if (x->said)
            printf("\"%s_bits_per_s\": %" PRIu64 ", ", x->measured ? "measured" : "declared", x->said);
        if (s->has_roster)
            printf("\"share\": %.6f, ", x->share);
        printf("\"port\": %u, \"answers\": %s, ", x->port, j->answers[i].err ? "false" : "true");
        if (j->answers[i].err)
            status_json_text("why", j->answers[i].why, "");
        else
            status_json_facts(&j->answers[i].facts);
        printf("}");
    }
    printf("]}\n");
}

/* --- the command --------------------------------------------------------------------------------- */

/* Ask at each address until somebody answers; *q is the attempt that did, or the last. */
static void status_ask_at(struct asker *a, const struct tly_addresses *to, struct query *q)
{
    for (int i = 0; i < to->count; i++) {
        struct tly_endpoints at;
        status_finish(a, q, 1);
        *q = (struct query){0};
        a->named = to->at[i];
        tly_address_text(&a->named, a->at, sizeof a->at);
        tly_media_at(&a->named, &at);
        status_start(a, q, &at);
        status_wait_for(a, q, 1);
        if (!q->err || q->from_coordinator || q->err == EACCES || q->err == ESTALE)
            break;
    }
}

static int status_explain(const struct query *q, const char *at)
{
    switch (q->err) {
    case ECONNREFUSED:
        return tly_cli_fail("status",
                            "nobody listens at %s: no job runs there, or on another port (TALLY_PORT)", at);
    case EACCES:
    case ESTALE:
        return tly_cli_fail("status", "%s refuses to answer: %s", at, q->why);
    case ECANCELED:
        return tly_cli_fail("status", "the job at %s has failed: %s", at, q->why);
    case EPROTO:
        return tly_cli_fail("status", "%s is not Tally, or another version of it: %s", at, q->why);
    case ECONNRESET:
        return tly_cli_fail("status", "%s hung up: it is not Tally, or its job is just ending (%s)", at,
                            q->why);
    default:
        return tly_cli_fail("status", "no answer from %s: %s", at, q->why);
    }
}

static int status_report(struct asker *a, struct query *q, bool json)
{
    struct job j = {.coordinator = q};
    if (!q->from_coordinator) {
        if (json) {
            status_json_start(q, "service", a->at);
            status_json_facts(&q->facts);
            printf("}\n");
        } else {
            status_print_service(q, a->at);
        }
        return 0;
    }
    int status = 0;
    a->identity.incarnation = q->peer.incarnation;
    memcpy(a->identity.job, q->peer.job, sizeof a->identity.job);
    status_place_members(&q->status, &a->named);
    if (status_list_services(&j) != 0) {
        status = tly_cli_fail("status", "out of memory");
    } else {
        status_ask_services(&j, a);
        if (json)
            status_json_job(&j, a);
        else
            status_print_job(&j, a);
    }
    status_finish(a, j.answers, j.service_count);
    free(j.services);
    free(j.answers);
    return status;
}

static int status_ask(const struct tly_place *place, double timeout_s, bool json)
{
    struct asker a = {.timeout_ns = (int64_t)(timeout_s * (double)TLY_SEC)};
    struct query q = {0};
    struct tly_addresses to;
    if (tly_place_resolve(place, &to) != 0 || tly_loop_init(&a.loop) != 0)
        return tly_cli_fail("status", "%s", tly_error());
    a.identity.role = TLY_ROLE_WATCHER;
    a.identity.rank = TLY_NO_RANK;
    memcpy(a.identity.secret, place->secret, sizeof place->secret);
    memcpy(a.identity.job, place->job, sizeof place->job);
    status_ask_at(&a, &to, &q);
    int status = q.err ? status_explain(&q, a.at) : status_report(&a, &q, json);
    status_finish(&a, &q, 1);
    tly_loop_finish(&a.loop);
    return status;
}

int tly_cli_status(int argc, char **argv)
{
    static const struct option options[] = {{"json", no_argument, NULL, 'j'},
                                            {"timeout", required_argument, NULL, 't'},
                                            {"help", no_argument, NULL, 'h'},
                                            {0}};
    bool json = false;
    long timeout_s = 5;
    for (int c; (c = getopt_long(argc, argv, "+h", options, NULL)) != -1;) {
        switch (c) {
        case 'j':
            json = true;
            break;
        case 't':
            timeout_s = tly_cli_number(optarg, 1, 3600);
            if (timeout_s < 0)
                return tly_cli_misuse("status", "--timeout %s: seconds, 1 to 3600", optarg);
            break;
        case 'h':
            fputs(tly_cli_status_usage, stdout);
            return 0;
        default:
            return CLI_USAGE;
        }
    }
    if (argc - optind > 1)
        return tly_cli_misuse("status", "unexpected argument %s", argv[optind + 1]);
    if (optind < argc && !*argv[optind])
        return tly_cli_misuse("status", "HOST is empty");
    char setting[320], why[TLY_SENTENCE];
    const char *settings[2] = {NULL}, *master = getenv("MASTER_ADDR");
    if (optind < argc) {
        snprintf(setting, sizeof setting, "TALLY_COORD=%s", argv[optind]);
        settings[0] = setting;
    }
    struct tly_params params;
    struct tly_place place;
    if (sodium_init() < 0)
        return tly_cli_fail("status", "no source of random numbers");
    if (tly_params_load(&params, settings, why, sizeof why) != 0)
        return tly_cli_fail("status", "%s", why);
    int status;
    tly_log_set_level("off"); /* what links have to say is said below, once */
    signal(SIGPIPE, SIG_IGN);
    if (!params.coord && !(master && *master))
        status = tly_cli_misuse("status", "no job is named: give rank 0's HOST, or set TALLY_COORD");
    else if (tly_place_find(&place, &params, false) != 0)
        status = tly_cli_fail("status", "%s", tly_error());
    else
        status = status_ask(&place, (double)timeout_s, json);
    tly_params_finish(&params);
    return status;
}
