/* roster.c - members, machines and the tree they sum along. */
#include "membership/roster.h"
#include "plan/cut.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/slot.h"

void tly_member_write(struct tly_writer *w, const struct tly_member_info *m)
{
    tly_write32(w, m->role);
    tly_write32(w, m->rank);
    tly_write32(w, m->size);
    tly_write32(w, m->restart);
    tly_write32(w, m->pid);
    tly_write64(w, m->netns);
    tly_write64(w, m->digest);
    tly_write64(w, m->nonce);
    tly_write64(w, m->incarnation);
    tly_write64(w, m->bandwidth);
    tly_write64(w, m->sum_rate);
    tly_write64(w, m->memory);
    tly_endpoints_write(w, &m->at);
    tly_write_text(w, m->host);
    tly_write_text(w, m->host_id);
    tly_write_text(w, m->door);
    tly_write_text(w, m->settings);
}

int tly_member_read(struct tly_reader *r, struct tly_member_info *m)
{
    struct tly_member_info x = {0};
    x.role = tly_read32(r);
    x.rank = tly_read32(r);
    x.size = tly_read32(r);
    x.restart = tly_read32(r);
    x.pid = tly_read32(r);
    x.netns = tly_read64(r);
    x.digest = tly_read64(r);
    x.nonce = tly_read64(r);
    x.incarnation = tly_read64(r);
    x.bandwidth = tly_read64(r);
    x.sum_rate = tly_read64(r);
    x.memory = tly_read64(r);
    int err = tly_endpoints_read(r, &x.at);
    tly_read_text(r, x.host, sizeof x.host);
    tly_read_text(r, x.host_id, sizeof x.host_id);
    tly_read_text(r, x.door, sizeof x.door);
    tly_read_text(r, x.settings, sizeof x.settings);
    bool rank_ok = x.role == TLY_ROLE_RANK && x.size >= 1 && x.size <= TLY_MAX_RANKS && x.rank < x.size;
    if (err || r->failed || x.bandwidth > TLY_MAX_RATE || x.sum_rate > TLY_MAX_RATE ||
        !(rank_ok || x.role == TLY_ROLE_TALLYD))
        return -EPROTO;
    *m = x;
    return 0;
}

void tly_roster_finish(struct tly_roster *r)
{
    if (!r)
        return;
    free(r->ranks);
    free(r->services);
    memset(r, 0, sizeof *r);
}

void tly_roster_write(struct tly_writer *w, const struct tly_roster *r)
{
    tly_write32(w, r->epoch);
    tly_write32(w, r->rank_count);
    tly_write32(w, r->machine_count);
    tly_write32(w, r->service_count);
    tly_write32(w, r->standalone);
    tly_write32(w, r->teams);
    tly_write32(w, r->joins);
    tly_write32(w, r->last_joined);
    tly_write64(w, r->part_bytes);
    tly_write64(w, r->part_least);
    tly_write64(w, r->part_most);
    tly_write64(w, r->window_bytes);
    tly_write32(w, r->window_fixed);
    for (uint32_t i = 0; i < r->rank_count; i++) {
        tly_write32(w, r->ranks[i].machine);
        tly_write32(w, r->ranks[i].local_rank);
        tly_write32(w, r->ranks[i].left);
        tly_write32(w, r->ranks[i].joined);
    }
    for (uint32_t i = 0; i < r->service_count; i++) {
        const struct tly_roster_service *s = &r->services[i];
        tly_write32(w, s->role);
        tly_write32(w, s->state);
        tly_write32(w, s->rank);
        tly_write64(w, s->incarnation);
        tly_write64(w, s->bandwidth);
        tly_write64(w, s->said);
        tly_write32(w, s->measured);
        tly_write32(w, s->tried);
        tly_write64(w, s->sum_rate);
        tly_write64(w, s->memory);
        tly_write64(w, s->sum_found);
        tly_write32(w, s->rests);
        tly_write32(w, s->card);
        tly_write32(w, s->weight);
        tly_write32(w, s->left);
        tly_endpoints_write(w, &s->at);
        tly_write_text(w, s->host);
    }
}

int tly_roster_read(struct tly_reader *rd, struct tly_roster *out)
{
    struct tly_roster r = {0};
    r.epoch = tly_read32(rd);
    r.rank_count = tly_read32(rd);
    r.machine_count = tly_read32(rd);
    r.service_count = tly_read32(rd);
    r.standalone = tly_read32(rd);
    r.teams = tly_read32(rd);
    r.joins = tly_read32(rd);
    r.last_joined = tly_read32(rd);
    r.part_bytes = tly_read64(rd);
    r.part_least = tly_read64(rd);
    r.part_most = tly_read64(rd);
    r.window_bytes = tly_read64(rd);
    r.window_fixed = tly_read32(rd);
    if (rd->failed || r.rank_count < 1 || r.rank_count > TLY_MAX_RANKS || r.machine_count < 1 ||
        r.machine_count > r.rank_count || r.machine_count > TLY_MAX_MACHINES ||
        r.service_count < r.machine_count || r.service_count > TLY_MAX_MACHINES || r.part_least < TLY_ALIGN ||
        r.part_bytes < r.part_least || r.part_most < r.part_bytes || r.part_most > TLY_MAX_PART ||
        r.part_least % TLY_ALIGN || r.part_bytes % TLY_ALIGN || r.part_most % TLY_ALIGN ||
        r.window_bytes < r.part_most || r.window_fixed > 1 || r.window_bytes > 1u << 30 || r.standalone > 1 ||
        r.teams > 1 || r.last_joined >= r.rank_count)
        return -EPROTO;
    r.ranks = calloc(r.rank_count, sizeof *r.ranks);
    r.services = calloc(r.service_count, sizeof *r.services);
    if (!r.ranks || !r.services) {
        tly_roster_finish(&r);
        return -ENOMEM;
    }
    bool bad = false, any_weight = false;
    for (uint32_t i = 0; i < r.rank_count; i++) {
        r.ranks[i].machine = tly_read32(rd);
        r.ranks[i].local_rank = tly_read32(rd);
        r.ranks[i].left = tly_read32(rd);
        r.ranks[i].joined = tly_read32(rd);
        bad |= r.ranks[i].machine >= r.machine_count || r.ranks[i].local_rank >= r.rank_count ||
               r.ranks[i].left > 1 || r.ranks[i].joined > r.rank_count;
    }
    for (uint32_t i = 0; i < r.service_count; i++) {
        struct tly_roster_service *s = &r.services[i];
        s->role = tly_read32(rd);
        s->state = tly_read32(rd);
        s->rank = tly_read32(rd);
        s->incarnation = tly_read64(rd);
        s->bandwidth = tly_read64(rd);
        s->said = tly_read64(rd);
        s->measured = tly_read32(rd);
        s->tried = tly_read32(rd);
        s->sum_rate = tly_read64(rd);
        s->memory = tly_read64(rd);
        s->sum_found = tly_read64(rd);
        s->rests = tly_read32(rd);
        s->card = tly_read32(rd);
        s->weight = tly_read32(rd);
        s->left = tly_read32(rd);
        bad |= tly_endpoints_read(rd, &s->at) != 0;
        tly_read_text(rd, s->host, sizeof s->host);
        bad |= s->role != (i < r.machine_count ? TLY_ROLE_RANK : TLY_ROLE_TALLYD) ||
               (i < r.machine_count && s->rank >= r.rank_count) || s->bandwidth > TLY_MAX_RATE ||
               s->sum_rate > TLY_MAX_RATE || s->said > TLY_MAX_RATE || s->sum_found > TLY_MAX_RATE ||
               s->measured > 1 || s->tried > 1 || s->rests > 1 || s->left > 1 || s->card > i ||
               r.services[s->card].card != s->card ||
               s->state > (i < r.machine_count ? TLY_SERVICE_ACTIVE : TLY_SERVICE_GONE);
        any_weight |= s->weight > 0;
    }
    if (bad || !any_weight || rd->failed) {
        tly_roster_finish(&r);
        return -EPROTO;
    }
    *out = r;
    return 0;
}

bool tly_roster_join(struct tly_roster *r, uint32_t rank)
{
    uint32_t last = 0;
    for (uint32_t i = 0; i < r->rank_count; i++)
        last = r->ranks[i].joined > last ? r->ranks[i].joined : last;
    if (r->ranks[rank].joined)
        return false;
    r->ranks[rank].joined = last + 1;
    return true;
}

void tly_roster_joined_all(struct tly_roster *r, uint32_t joins, uint32_t last)
{
    r->joins = joins;
    r->last_joined = last;
    for (uint32_t i = 0; i < r->rank_count; i++)
        r->ranks[i].joined = 0;
}

void tly_roster_merge_joins(struct tly_roster *to, const struct tly_roster *from)
{
    if (from->joins < to->joins)
        return;
    if (from->joins > to->joins)
        tly_roster_joined_all(to, from->joins, from->last_joined);
    for (uint32_t i = 0; i < to->rank_count && i < from->rank_count; i++)
        if (from->ranks[i].joined > to->ranks[i].joined)
            to->ranks[i].joined = from->ranks[i].joined;
}

void tly_roster_group(struct tly_roster *r, uint32_t n, const uint32_t *same)
{
    r->rank_count = n;
    r->machine_count = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t first = same[i], local = 0;
        if (first == i) {
            r->ranks[i] = (struct tly_roster_rank){.machine = r->machine_count++};
            continue;
        }
        for (uint32_t j = first; j < i; j++)
            local += same[j] == first;
        r->ranks[i] = (struct tly_roster_rank){.machine = r->ranks[first].machine, .local_rank = local};
    }
}

static double roster_slowest(const struct tly_roster *r)
{
    uint64_t least = 0;
    for (uint32_t i = 0; i < r->service_count; i++)
        if (r->services[i].bandwidth && (!least || r->services[i].bandwidth < least))
            least = r->services[i].bandwidth;
    return (double)least / 8;
}

double tly_roster_usual(const struct tly_roster *r)
{
    double total = 0, sum = 0, carried = 0, pushes = 0;
    for (uint32_t i = 0; i < r->service_count; i++)
        total += r->services[i].weight;
    for (uint32_t i = 0; i < r->machine_count; i++)
        pushes += r->services[i].state == TLY_SERVICE_ACTIVE;
    for (uint32_t i = 0; i < r->service_count && total > 0; i++) {
        const struct tly_roster_service *s = &r->services[i];
        double share = s->weight / total,
               crosses = i < r->machine_count ? 1 + (pushes - 2) * share : pushes * share;
        if (!s->bandwidth || crosses <= 0)
            continue;
        carried += crosses;
        sum += crosses * (double)s->bandwidth / 8;
    }
    return carried > 0 ? sum / carried : roster_slowest(r);
}

static uint32_t roster_pushes_of(const struct tly_roster *r)
{
    return r->teams ? r->machine_count : r->rank_count;
}

/* Inputs/s that a service's memory has room for; 0: as many as its card can bring.  An input stays until all ranks' like it
 * are there and the result is with all: as long as a rank's credit takes to leave it, and a
 * part to cross a card once for each rank, in and out.  A slot is a power of two, so up to half of it is empty. */
static double roster_memory_rate(const struct tly_roster *r, const struct tly_roster_service *s)
{
    double usual = tly_roster_usual(r), card = s->bandwidth ? (double)s->bandwidth / 8 : roster_slowest(r);
    double credit = (double)tly_plan_sum_credit((int)r->service_count, false, r->part_bytes, r->part_bytes);
    double stay = (credit + (2.0 * roster_pushes_of(r) + 1) * (double)r->part_bytes) / usual;
    double rate = (double)s->memory / 2 / stay;
    return s->memory && usual > 0 && rate < card ? rate : 0;
}

/* 0 is no limit. */
static double roster_lower(double a, double b)
{
    return a > 0 && (b <= 0 || a < b) ? a : b;
}

void tly_roster_machines(const struct tly_roster *r, struct tly_plan_machine *machine)
{
    for (uint32_t i = 0; i < r->service_count; i++) {
        const struct tly_roster_service *s = &r->services[i];
        machine[i] = (struct tly_plan_machine){
            .card = s->card, .bandwidth = (double)s->bandwidth / 8, .sum_rate = (double)s->sum_rate / 8};
        machine[i].sum_rate = roster_lower(machine[i].sum_rate, (double)s->sum_found / 8);
        machine[i].sum_rate = roster_lower(machine[i].sum_rate, roster_memory_rate(r, s));
    }
    for (uint32_t i = 0; i < r->rank_count; i++)
        if (!r->teams || r->ranks[i].local_rank == 0)
            machine[r->ranks[i].machine].ranks++;
}

uint64_t tly_roster_least_memory(const struct tly_roster *r)
{
    return (r->rank_count + 1ull) * tly_slot_bytes(r->part_most);
}

bool tly_roster_lacks_memory(const struct tly_roster *r, uint32_t service)
{
    const struct tly_roster_service *s = &r->services[service];
    return s->role == TLY_ROLE_TALLYD && s->memory && s->memory < tly_roster_least_memory(r);
}

bool tly_roster_shares(const struct tly_roster *r, uint32_t service)
{
    const struct tly_roster_service *s = &r->services[service];
    return s->state == TLY_SERVICE_ACTIVE && !s->rests && !tly_roster_lacks_memory(r, service);
}

/* The services that may have a share as the plan sees them; at[i] is a service's place among them.  How many there are. */
static uint32_t roster_active_machines(const struct tly_roster *r, struct tly_plan_machine *machine,
                                       uint32_t *at)
{
    uint32_t active = 0;
    tly_roster_machines(r, machine);
    for (uint32_t i = 0; i < r->service_count; i++) {
        if (!tly_roster_shares(r, i))
            continue;
        uint32_t first = 0; /* of those that share, the first behind the same card */
        while (!tly_roster_shares(r, first) || r->services[first].card != r->services[i].card)
            first++;
        at[i] = active;
        machine[active] = machine[i];
        machine[active++].card = at[first];
    }
    return active;
}

enum tly_split tly_roster_split_named(const char *name)
{
    return strcmp(name, "server") == 0       ? TLY_SPLIT_SERVER
           : strcmp(name, "all-reduce") == 0 ? TLY_SPLIT_ALL_REDUCE
                                             : TLY_SPLIT_OPTIMAL;
}

uint32_t tly_roster_doubtful(const struct tly_roster *r, const char **host)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < r->service_count; i++) {
        const struct tly_roster_service *s = &r->services[i];
        if (s->state != TLY_SERVICE_ACTIVE || s->card != i || !s->tried)
            continue;
        if (count++ == 0)
            *host = s->host;
    }
    return count;
}

uint32_t tly_roster_spare(const struct tly_roster *r, enum tly_split split)
{
    struct tly_plan_machine *machine = calloc(r->service_count, sizeof *machine);
    uint32_t *at = calloc(r->service_count, sizeof *at), spare = 0;
    if (machine && at)
        spare = (uint32_t)tly_plan_spare(split, (int)roster_active_machines(r, machine, at), machine);
    free(machine);
    free(at);
    return spare;
}

int tly_roster_split(struct tly_roster *r, enum tly_split split)
{
    uint32_t n = r->service_count;
    struct tly_plan_machine *machine = calloc(n, sizeof *machine);
    uint32_t *weight = calloc(n, sizeof *weight), *at = calloc(n, sizeof *at);
    int err = machine && weight && at ? 0 : -ENOMEM;
    if (!err)
        err = tly_plan_split(split, (int)roster_active_machines(r, machine, at), machine, weight);
    for (uint32_t i = 0; !err && i < n; i++)
        r->services[i].weight = tly_roster_shares(r, i) ? weight[at[i]] : 0;
    free(machine);
    free(weight);
    free(at);
    return err;
}

uint32_t tly_roster_active(const struct tly_roster *r)
{
    uint32_t active = 0;
    for (uint32_t i = 0; i < r->service_count; i++)
        active += r->services[i].weight > 0;
    return active;
}

uint64_t tly_roster_window(int active, uint64_t part_bytes, uint64_t memory, uint32_t ranks)
{
    uint64_t twice = 2 * tly_plan_sum_credit(active, false, part_bytes, part_bytes),
             room = memory / 2 / (ranks + 1ull);
    uint64_t share = TLY_WINDOWS_PARTS * part_bytes / (uint64_t)(active > 0 ? active : 1);
    if (share > TLY_MOST_SHARE)
        share = TLY_MOST_SHARE;
    uint64_t suits = share > twice ? share : twice;
    return suits < room ? suits : room;
}

bool tly_roster_is_node(uint32_t lo, uint32_t hi, uint32_t from, uint32_t to)
{
    while (lo != from || hi != to) {
        if (hi - lo < 2)
            return false;
        uint32_t m = 1;
        while (m * 2 < hi - lo)
            m *= 2;
        if (to <= lo + m)
            hi = lo + m;
        else if (from >= lo + m)
            lo += m;
        else
            return false;
    }
    return true;
}

bool tly_roster_tree(const struct tly_roster *r, bool sixteen_bit, int *groups, int *group_size,
                     uint32_t *order)
{
    uint32_t n = r->rank_count;
    bool flat = !sixteen_bit || r->machine_count == n;
    /* A machine's ranks must be neighbours to be a node. */
    for (uint32_t i = 0; flat && i < n;) {
        uint32_t end = i + 1;
        while (end < n && r->ranks[end].machine == r->ranks[i].machine)
            end++;
        for (uint32_t j = end; j < n; j++)
            flat &= r->ranks[j].machine != r->ranks[i].machine;
        flat = flat && tly_roster_is_node(0, n, i, end);
        i = end;
    }
    if (flat) {
        for (uint32_t i = 0; i < n; i++)
            order[i] = i;
        group_size[0] = (int)n;
        *groups = 1;
        return true;
    }
    uint32_t at = 0;
    for (uint32_t m = 0; m < r->machine_count; m++) {
        group_size[m] = 0;
        for (uint32_t i = 0; i < n; i++)
            if (r->ranks[i].machine == m) {
                order[at++] = i;
                group_size[m]++;
            }
    }
    *groups = (int)r->machine_count;
    return false;
}

bool tly_roster_suits_teams(const struct tly_roster *r)
{
    return r->machine_count > 1 && r->machine_count < r->rank_count;
}

void tly_service_name(const struct tly_roster *r, uint32_t service, char *out, size_t len)
{
    const struct tly_roster_service *s = &r->services[service];
    char address[TLY_HOST_TEXT];
    uint32_t port = tly_endpoints_host(&s->at, address);
    if (s->role == TLY_ROLE_RANK)
        snprintf(out, len, "the service of rank %u on %s (%s port %u)", s->rank, s->host, address, port);
    else
        snprintf(out, len, "tallyd %u on %s (%s port %u)", service - r->machine_count, s->host, address,
                 port);
}
