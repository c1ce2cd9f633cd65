/* status.h - what a coordinator says of its job: to `tally status` how it stands, to all members who holds it up.
 * Encoding; no I/O. */
#ifndef TLY_STATUS_H
#define TLY_STATUS_H

#include <stdbool.h>
#include <stdint.h>

#include "membership/roster.h"

/* How far a job has come. */
enum tly_job_state {
    TLY_JOB_GATHERING, /* waiting for members */
    TLY_JOB_PROVING,   /* finding out who shares a machine */
    TLY_JOB_MEASURING, /* finding out what network cards carry that do not say it */
    TLY_JOB_INVITING,  /* connecting to the services */
    TLY_JOB_RUNNING,
    TLY_JOB_FAILED,
    TLY_JOB_ENDED
};

/* How far a member has come. */
enum tly_stand { TLY_STAND_JOINED, TLY_STAND_PROVED, TLY_STAND_CONNECTED, TLY_STAND_LEFT };

/* The machine or rank that holds the job up, and how. */
enum tly_why {
    TLY_WHY_NOBODY,
    TLY_WHY_CARD,
    TLY_WHY_SUMS,
    TLY_WHY_COMPUTES, /* a rank, by itself */
    TLY_WHY_ALL_CARDS,
    TLY_WHY_WAITS, /* a rank, without a processor */
    TLY_WHY_PAGES, /* a rank, with memory that comes from a disk */
    TLY_WHY_TURNS, /* several by turns */
    TLY_WHYS
};
struct tly_slow {
    uint32_t why;   /* enum tly_why */
    char who[120];  /* "tallyd 1 (c1)"; "" nobody */
    char what[300]; /* "carries 0.1 of 0.48 Gbit/s since 12:03:11" */
};

void tly_slow_write(struct tly_writer *w, const struct tly_slow *s);
int tly_slow_read(struct tly_reader *r, struct tly_slow *s); /* -EPROTO; *s untouched then */
/* "tallyd 1 (c1), which carries ...", "nobody alone: by turns ..."; "": nobody. */
void tly_slow_text(const struct tly_slow *s, char *out, size_t len);
/* A word for programs: "card", "processor", "computing", "all cards", "processor wait", "paging", "by turns"; "": nobody. */
const char *tly_slow_why(const struct tly_slow *s);

/* The last change of the split. */
struct tly_change {
    uint64_t at;    /* seconds since 1970; 0: there was none yet */
    char when[16];  /* the same as the coordinator's time of day, "12:03:11" */
    char what[400]; /* "tallyd 1 (c1) carries ...: its share is now 6% ..." */
};

void tly_change_write(struct tly_writer *w, const struct tly_change *c);
int tly_change_read(struct tly_reader *r, struct tly_change *c); /* -EPROTO; *c untouched then */

/* What each service's network card carries now: the plan's figure until it is seen.  The split follows it only where that pays. */
struct tly_currents {
    uint32_t epoch;      /* whose roster numbers the services */
    uint32_t count;      /* of services; 0: nothing is known */
    uint64_t *bandwidth; /* owned: bit/s; 0: not known */
};

void tly_currents_write(struct tly_writer *w, const struct tly_currents *c);
int tly_currents_read(struct tly_reader *r, struct tly_currents *c); /* -EPROTO, -ENOMEM; *c untouched then */
void tly_currents_finish(struct tly_currents *c);
/* The figure of a service of this roster.  Where nothing is known, that is the plan's. */
uint64_t tly_current(const struct tly_currents *c, const struct tly_roster *r, uint32_t service);

struct tly_status_member {
    uint32_t role; /* TLY_ROLE_RANK or TLY_ROLE_TALLYD */
    uint32_t rank; /* TLY_NO_RANK of a tallyd */
    uint32_t pid;
    uint32_t stand;          /* enum tly_stand */
    struct tly_endpoints at; /* of its service; the host may be "::": where the coordinator is */
    char host[64];
};

struct tly_status {
    uint32_t state;   /* enum tly_job_state */
    uint32_t size;    /* ranks; 0 until the first has joined */
    uint32_t servers; /* tallyd that the start waits for (TALLY_SERVERS) */
    uint64_t age_ms;  /* of the coordinator */
    uint32_t member_count;
    struct tly_status_member *members; /* owned */
    struct tly_slow slow;              /* who holds the job up */
    struct tly_change changed;
    bool has_roster; /* from INVITING on */
    struct tly_roster roster;
    struct tly_currents current;
};

void tly_status_finish(struct tly_status *s);
void tly_status_write(struct tly_writer *w, const struct tly_status *s);
/* -EPROTO, -ENOMEM; *s untouched then. */
int tly_status_read(struct tly_reader *r, struct tly_status *s);

#endif
