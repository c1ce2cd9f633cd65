/* roster.c - fuzzes what members and the coordinator tell each other: whatever comes is refused, or is a roster
 * that can be used: every index within bounds, and the same again when written and read.  Also what a service answers
 * to who asks how it stands. */
#include "membership/status.h"
#include "sum/service.h"

#include <string.h>

#include "fuzz.h"

static void use(struct tly_roster *r)
{
    struct tly_roster again;
    struct tly_writer w = {0};
    int groups, *sizes = calloc(r->rank_count, sizeof *sizes), leaves = 0;
    uint32_t *order = calloc(r->rank_count, sizeof *order);
    char name[300];
    require(sizes && order);
    for (uint32_t i = 0; i < r->rank_count; i++)
        require(r->ranks[i].machine < r->machine_count);
    for (uint32_t i = 0; i < r->service_count; i++)
        tly_service_name(r, i, name, sizeof name);
    if (r->rank_count <= 64) { /* the tree is quadratic */
        tly_roster_tree(r, false, &groups, sizes, order);
        for (int i = 0; i < groups; i++)
            leaves += sizes[i];
        require((uint32_t)leaves == r->rank_count);
    }
    tly_roster_write(&w, r);
    require(!w.failed);
    struct tly_reader rd = {w.data, w.len, false};
    require(tly_roster_read(&rd, &again) == 0 && again.service_count == r->service_count);
    tly_roster_finish(&again);
    free(w.data);
    free(sizes);
    free(order);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct tly_roster roster;
    struct tly_member_info member;
    struct tly_status status;
    struct tly_reader r = {data, size, false}, m = {data, size, false}, s = {data, size, false};
    if (tly_roster_read(&r, &roster) == 0) {
        use(&roster);
        tly_roster_finish(&roster);
    }
    if (tly_member_read(&m, &member) == 0) {
        require(member.role == TLY_ROLE_TALLYD || member.rank < member.size);
        require(member.bandwidth <= TLY_MAX_RATE);
        require(strnlen(member.host, sizeof member.host) < sizeof member.host);
    }
    if (tly_status_read(&s, &status) == 0) {
        for (uint32_t i = 0; i < status.member_count; i++)
            require(status.members[i].role == TLY_ROLE_TALLYD || status.members[i].rank < status.size);
        if (status.has_roster)
            use(&status.roster);
        for (uint32_t i = 0; i < status.roster.service_count; i++)
            require(tly_current(&status.current, &status.roster, i) <= TLY_MAX_RATE);
        tly_status_finish(&status);
    }
    struct tly_reader f = {data, size, false};
    struct tly_service_facts facts, again;
    if (tly_service_facts_read(&f, &facts) == 0) {
        struct tly_writer w = {0};
        tly_service_facts_write(&w, &facts);
        require(!w.failed);
        struct tly_reader rd = {w.data, w.len, false};
        require(tly_service_facts_read(&rd, &again) == 0 && strcmp(facts.waits_for, again.waits_for) == 0);
        free(w.data);
    }
    return 0;
}
