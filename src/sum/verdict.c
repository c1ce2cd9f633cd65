/* verdict.c - decisions of the home of a tensor (the service of its part 0) about rounds that cannot end with a result.
 *
 * A verdict is one sentence, the same for every rank.  It ends the round in place of a result: its slots are emptied, ranks
 * that have pushed are told at once, and the others when they push.  The cases:
 *
 *   ranks disagree   Two spec hashes differ (tly_round_push).  Home asks all ranks for their specs in words (SPEC).  When it has
 *                    all texts, or after a second, it makes one sentence of them (words.c).
 *   a rank refuses   Its push is an error mark (TLY_MARK), and the mark's reason becomes the verdict.
 *   a rank cancels   Its CANCEL has TLY_MARK.  It becomes the verdict unless all ranks have pushed part 0.
 *   a rank has left  Rounds that lack it end.  A service that comes later finds it in the roster (tly_service_change).
 *   a rank is late   tly_verdict_tick() names it in a STATUS to all ranks that wait, first after TALLY_LATE_WARNING and then at
 *                    each doubling.  While every waiting rank has joined (TLY_PATIENT), no rank is late.  After
 *                    TALLY_TIMEOUT a rank that waits and has not joined complains to the coordinator, which fails the job.
 *
 * Another service than home decides only about shared tensors, each part of which has a state of its own.  One that sees two
 * specs sums nothing and waits for the ranks' CANCELs.  One that has summed the beginning of a part sums no more of it
 * (tly_round_cancel). */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/list.h"
#include "base/log.h"
#include "base/text.h"
#include "sum/internal.h"
#include "sum/members.h"
#include "sum/round.h"
#include "sum/session.h"
#include "sum/slot.h"
#include "sum/verdict.h"
#include "sum/words.h"
#include "transport/outbox.h"

enum { WAIT_FOR_TEXTS_MS = 1000 };

static struct tly_frame verdict_about(const struct tly_round *r, int type)
{
    struct tly_frame f = r->head;
    f.type = (uint8_t)type;
    f.flags = 0;
    f.length = f.offset = f.payload = 0;
    f.place = 0;
    return f;
}

/* "2, 4-6" of the ranks for which `is` holds.  Returns how many there are. */
static uint32_t verdict_ranks_text(
    struct tly_job *job, const struct tly_round *r,
    bool (*is)(struct tly_job *job, const struct tly_round *r, uint32_t rank, const char *text),
    const char *text, char *out, size_t len)
{
    uint32_t count = 0;
    size_t at = 0;
    out[0] = '\0';
    for (uint32_t i = 0; i < job->ranks; i++) {
        if (!is(job, r, i, text))
            continue;
        uint32_t end = i;
        while (end + 1 < job->ranks && is(job, r, end + 1, text))
            end++;
        count += end - i + 1;
        at = tly_text_append_range(out, len, at, i, end);
        i = end;
    }
    return count;
}

static bool verdict_has_text(struct tly_job *job, const struct tly_round *r, uint32_t rank, const char *text)
{
    return r->slots[rank].text && strcmp(r->slots[rank].text, text) == 0;
}

static bool verdict_is_absent(struct tly_job *job, const struct tly_round *r, uint32_t rank, const char *text)
{
    return r->slots[rank].state == SLOT_ABSENT && tly_members_have(r->who, rank);
}

static bool verdict_is_member(struct tly_job *job, const struct tly_round *r, uint32_t rank, const char *text)
{
    return tly_members_have(r->who, rank);
}

static bool verdict_is_behind(struct tly_job *job, const struct tly_round *r, uint32_t rank, const char *text)
{
    return r->waits && r->rule->behind && r->rule->behind(job, r, rank) > 0;
}

static bool verdict_is_late(struct tly_job *job, const struct tly_round *r, uint32_t rank, const char *text)
{
    return verdict_is_absent(job, r, rank, text) || verdict_is_behind(job, r, rank, text);
}

/* Append to the names of ranks by how many steps the last of them is behind. */
static void verdict_append_steps(const struct tly_job *job, const struct tly_round *r, char *out, size_t len)
{
    uint32_t most = 0;
    for (uint32_t i = 0; i < job->ranks && r->waits && r->rule->behind; i++) {
        uint32_t steps = r->rule->behind(job, r, i);
        most = steps > most ? steps : most;
    }
    size_t at = strlen(out);
    if (most)
        snprintf(out + at, len - at, " (%u step%s too far behind)", most, most > 1 ? "s" : "");
}

static bool verdict_is_coming(struct tly_job *job, const struct tly_round *r, uint32_t rank, const char *text)
{
    return r->slots[rank].state == SLOT_COMING;
}

static bool verdict_is_dropped(struct tly_job *job, const struct tly_round *r, uint32_t rank,
                               const char *text)
{
    return r->slots[rank].state == SLOT_DROPPED || r->slots[rank].state == SLOT_AGAIN;
}

static void verdict_tell(struct tly_session *p, struct tly_round *r)
{
    tly_window_owe(p->job, r, p->rank);
    struct tly_frame f = verdict_about(r, TLY_VERDICT);
    struct tly_writer w = {0};
    tly_write32(&w, (uint32_t)r->verdict_err);
    tly_write_text(&w, r->verdict);
    if (w.failed)
        tly_outbox_lose(&p->outbox);
    else
        tly_session_post(p, &f, w.data, w.len, r);
    free(w.data);
}

void tly_verdict_decide(struct tly_job *job, struct tly_round *r, int err, const char *sentence)
{
    if (r->verdict || r->complete)
        return;
    if (r->pieces_left) { /* the crew reads the slots: again with the tick */
        if (!r->mismatch_at) {
            r->mismatch_at = job->loop->awake;
            job->mismatches++;
        }
        return;
    }
    r->verdict = strdup(sentence);
    for (uint32_t i = 0; i < job->ranks && !r->verdict; i++)
        if (job->by_rank[i])
            tly_outbox_lose(&job->by_rank[i]->outbox);
    if (!r->verdict)
        return;
    r->verdict_err = err;
    r->decided = job->loop->awake;
    tly_store_complete(job, r);
    tly_memory_forget_slots(job, r);
    for (uint32_t i = 0; i < job->ranks; i++) {
        struct tly_session *p = job->by_rank[i];
        if (r->slots[i].state == SLOT_JOINED)
            continue;
        if (r->slots[i].state != SLOT_ABSENT && p)
            verdict_tell(p, r);
        else if ((p ? p->left : job->gone[i]) && tly_members_have(r->who, i)) { /* will never ask */
            r->answers[i].received = true;
            r->received++;
        }
    }
    if (job->joined_count)
        tly_joined_mark(job, r);
    if (job->dropped_slots)
        tly_memory_ask_again(job);
}

static void verdict_ask(struct tly_job *job, struct tly_round *r, uint32_t rank)
{
    struct tly_frame f = verdict_about(r, TLY_SPEC);
    f.flags = TLY_REQUEST;
    if (job->by_rank[rank])
        tly_session_post(job->by_rank[rank], &f, NULL, 0, NULL);
}

/* Two specs for one round.  Home asks all for theirs; another service just waits to be told to forget it. */
void tly_verdict_differs(struct tly_job *job, struct tly_round *r)
{
    r->mismatch_at = job->loop->awake;
    job->mismatches++;
    if (r->head.part != 0)
        return;
    r->asked = true;
    for (uint32_t i = 0; i < job->ranks; i++)
        if (tly_slot_has_come(&r->slots[i]))
            verdict_ask(job, r, i);
}

/* A push has come for a round that has failed or is about to. */
void tly_verdict_arrived(struct tly_session *p, struct tly_round *r)
{
    if (r->verdict)
        verdict_tell(p, r);
    else if (r->asked)
        verdict_ask(p->job, r, p->rank);
}

static void verdict_compose(struct tly_job *job, struct tly_round *r)
{
    char sentence[TLY_SENTENCE], ranks[200], who[210];
    size_t at = (size_t)snprintf(sentence, sizeof sentence, "the ranks disagree: ");
    const char *first = NULL;
    bool whole = false; /* their titles differ */
    for (uint32_t i = 0; i < job->ranks; i++) {
        const char *text = r->slots[i].text;
        whole |= text && first && !tly_words_same_title(first, text);
        first = first ? first : text;
    }
    const char *before = NULL;
    for (uint32_t i = 0; i < job->ranks && at < sizeof sentence; i++) {
        const char *text = r->slots[i].text;
        bool seen = !text;
        for (uint32_t j = 0; j < i && !seen; j++)
            seen = verdict_has_text(job, r, j, text);
        if (seen)
            continue;
        uint32_t n = verdict_ranks_text(job, r, verdict_has_text, text, ranks, sizeof ranks);
        snprintf(who, sizeof who, "%s %s", n > 1 ? "ranks" : "rank", ranks);
        at = tly_words_append(sentence, sizeof sentence, at, before, text, who, whole);
        before = first;
    }
    tly_verdict_decide(job, r, EINVAL, sentence);
}

void tly_verdict_text(struct tly_session *p, struct tly_round *r, char *text)
{
    struct tly_job *job = p->job;
    struct tly_slot *slot = &r->slots[p->rank];
    if (!r->asked || r->verdict) {
        free(text);
        return;
    }
    free(slot->text);
    slot->text = text;
    for (uint32_t i = 0; i < r->who->count; i++)
        if (!r->slots[r->who->rank[i]].text && r->slots[r->who->rank[i]].state != SLOT_JOINED)
            return;
    verdict_compose(job, r);
}

void tly_verdict_too_late(struct tly_session *p, struct tly_round *r)
{
    char sentence[TLY_SENTENCE], ranks[200];
    verdict_ranks_text(p->job, r, verdict_is_member, NULL, ranks, sizeof ranks);
    snprintf(sentence, sizeof sentence, "the ranks disagree: the group of ranks %s has none of rank %u",
             ranks, p->rank);
    r->verdict = strdup(sentence);
    r->verdict_err = EINVAL;
    if (!r->verdict)
        tly_outbox_lose(&p->outbox);
}

void tly_verdict_known(struct tly_session *p, struct tly_round *r, int err, const char *sentence)
{
    if (r->verdict)
        verdict_tell(p, r);
    else
        tly_verdict_decide(p->job, r, err, sentence);
}

void tly_verdict_refused(struct tly_session *p, struct tly_round *r, bool cancelled, const char *reason)
{
    char sentence[TLY_SENTENCE];
    snprintf(sentence, sizeof sentence, "rank %u %s: %s", p->rank, cancelled ? "has cancelled it" : "refuses",
             reason);
    tly_verdict_decide(p->job, r, cancelled ? ECANCELED : EINVAL, sentence);
}

void tly_verdict_cancelled(struct tly_session *p, struct tly_round *r, const char *reason)
{
    bool answered = r->summed || r->pieces_left || r->had; /* or about to be: all have pushed it */
    if (r->head.part == 0 && r->slots[p->rank].state != SLOT_ABSENT && !answered)
        tly_verdict_refused(p, r, true, reason);
}

/* A rank has left: rounds that lack it will never be complete. */
void tly_verdict_left(struct tly_job *job, uint32_t rank)
{
    char sentence[64];
    snprintf(sentence, sizeof sentence, "rank %u has left the job", rank);
    for (struct tly_list *n = job->incomplete.next, *next; n != &job->incomplete; n = next) {
        struct tly_round *r = tly_list_entry(n, struct tly_round, node);
        next = n->next;
        if (r->head.part == 0 && r->slots[rank].state == SLOT_ABSENT && !r->had &&
            tly_members_have(r->who, rank))
            tly_verdict_decide(job, r, ESHUTDOWN, sentence);
    }
}

static bool verdict_is_missed(struct tly_job *job, const struct tly_round *r, uint32_t rank, const char *text)
{
    return tly_joined_is_missed(job, r, rank);
}

void tly_verdict_joined(struct tly_job *job, struct tly_round *r)
{
    char sentence[TLY_SENTENCE], ranks[200];
    if (r->head.part != 0 || r->had || r->verdict)
        return;
    uint32_t count = verdict_ranks_text(job, r, verdict_is_missed, NULL, ranks, sizeof ranks);
    if (!count)
        return;
    snprintf(sentence, sizeof sentence,
             "rank%s %s %s joined: until all ranks have, only all-reduces and barriers of all ranks go on",
             count > 1 ? "s" : "", ranks, count > 1 ? "have" : "has");
    tly_verdict_decide(job, r, EINVAL, sentence);
}

void tly_verdict_late(struct tly_job *job, struct tly_round *r, const struct tly_session *asker)
{
    char late[200];
    struct tly_frame f = verdict_about(r, TLY_STATUS);
    struct tly_writer w = {0};
    bool named = false;
    verdict_ranks_text(job, r, verdict_is_late, NULL, late, sizeof late);
    if (!late[0])
        return;
    verdict_append_steps(job, r, late, sizeof late);
    tly_write64(&w, (uint64_t)(job->loop->awake - (r->since ? r->since : r->born)));
    tly_write_text(&w, late);
    /* All who wait learn for whom; the lowest of them says it aloud.  Who asks learns it alone. */
    for (uint32_t i = 0; i < job->ranks && !w.failed; i++) {
        if (!tly_slot_has_come(&r->slots[i]) || !job->by_rank[i] || (asker && job->by_rank[i] != asker))
            continue;
        f.flags = named || asker ? 0 : TLY_MARK;
        named = true;
        tly_session_post(job->by_rank[i], &f, w.data, w.len, NULL);
    }
    free(w.data);
}

int64_t tly_verdict_waits(struct tly_job *job, char *out, size_t len)
{
    out[0] = '\0';
    if (tly_list_empty(&job->incomplete))
        return 0;
    struct tly_round *r = tly_list_entry(job->incomplete.next, struct tly_round, node);
    static const struct {
        bool (*is)(struct tly_job *job, const struct tly_round *r, uint32_t rank, const char *text);
        const char *why;
    } reasons[] = {{verdict_is_absent, "did not send any of it yet"},
                   {verdict_is_coming, "did not send all of it yet"},
                   {verdict_is_dropped, "must send it again, for want of memory here"},
                   {verdict_is_behind, "did not add enough to a shared tensor yet"}};
    for (size_t i = 0; i < sizeof reasons / sizeof *reasons; i++) {
        char ranks[160];
        uint32_t count = verdict_ranks_text(job, r, reasons[i].is, NULL, ranks, sizeof ranks - 40);
        if (count) {
            verdict_append_steps(job, r, ranks, sizeof ranks);
            snprintf(out, len, "rank%s %s, which %s", count > 1 ? "s" : "", ranks, reasons[i].why);
            return job->loop->awake - r->born;
        }
    }
    snprintf(out, len, "the sum");
    return job->loop->awake - r->born;
}

void tly_verdict_tick(struct tly_job *job)
{
    int64_t now = job->loop->awake;
    for (struct tly_list *n = job->incomplete.next, *next; n != &job->incomplete; n = next) {
        struct tly_round *r = tly_list_entry(n, struct tly_round, node);
        next = n->next;
        if (r->head.part != 0)
            continue;
        if (r->since && now >= r->warn_at) {
            r->warn_at += r->warn_at - r->since; /* at each doubling */
            tly_verdict_late(job, r, NULL);
        }
        if (r->mismatch_at && now - r->mismatch_at >= WAIT_FOR_TEXTS_MS * TLY_MS)
            verdict_compose(job, r);
        else if (now - r->born < job->late_ns && !job->mismatches)
            break; /* all behind are younger */
    }
}
