/* timeline.h - what the processes of a job did when, as slices of time in rows; and the file that holds it,
 * Chrome's trace format as Perfetto opens it, one event a line.
 *
 * tly_timeline_read() reads back the files of tly_timeline_write(), and refuses everything else. */
#ifndef TLY_TIMELINE_H
#define TLY_TIMELINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* A rank's rows and then a service's.  Times are those of one part, but for OPERATION. */
enum tly_row {
    TLY_ROW_OPERATION, /* submitted to done */
    TLY_ROW_QUEUE,     /* queued to admitted: waits for credit or window */
    TLY_ROW_LINE,      /* admitted to its first byte going to the kernel */
    TLY_ROW_SEND,      /* ... to the kernel having its last */
    TLY_ROW_WAIT,      /* sent to the result's first byte */
    TLY_ROW_RESULT,    /* the result's first byte to its last */
    TLY_ROW_CHANGE,    /* PREPARE to COMMIT: nothing new begins while the split changes */
    TLY_ROW_GATHER,    /* the first rank's first byte to the last rank's last */
    TLY_ROW_PUSH,      /* one rank's first byte to its last */
    TLY_ROW_SUM,       /* the last rank's last byte to the end of the sum */
    TLY_ROW_ANSWER,    /* the answer's first byte going to the kernel, to the kernel having its last */
    TLY_ROWS
};

struct tly_row_facts {
    const char *name; /* in the file, in the summary and in docs/trace.md */
    const char *peer; /* what a viewer shows between name and peer; NULL: the row has none */
    bool waits, service;
};
extern const struct tly_row_facts tly_rows[TLY_ROWS];

enum { TLY_NO_PEER = 0xffffffff, TLY_NO_PART = 0xffffffff };
enum { TLY_TIMELINE_FORMAT = 3, TLY_TIMELINE_NAME = 512 }; /* of the file; bytes of a tensor's name in it */

struct tly_slice {
    int64_t from, to; /* ns, on its process's clock */
    uint64_t key;     /* of the tensor */
    uint32_t round, part, bytes;
    uint32_t peer; /* a rank's: service; a service's: rank; or TLY_NO_PEER */
    uint8_t row;
    bool open; /* it had not ended when the file was written */
};

/* Bytes handed over and not yet accepted. */
struct tly_sample {
    int64_t at;
    uint64_t bytes;
};

struct tly_process {
    bool service;
    uint32_t index; /* of the rank or the service */
    uint32_t rank;  /* in whose process it runs; TLY_NO_PEER: a tallyd */
    uint32_t pid;   /* in the file; of the last that was written or read */
    char job[64], host[64];
    char clock[64];       /* what tells its monotonic clock from others: kernel and time namespace */
    char machine[64];     /* what tells its machine from others: the host id */
    int64_t from, to;     /* ns, on its clock: since when it has stamped, and when it wrote this */
    uint64_t start;       /* the number of this start of the job */
    uint64_t incarnation; /* of a service: another one may have had its place before; a rank's is 0 */
    uint64_t lost;        /* stamps that were overwritten */
    int64_t offset,
        error; /* by how much its clock was ahead of the first one's, give or take; 0: not merged */
    struct tly_slice *slices; /* owned */
    size_t slice_count, slice_room;
    struct tly_sample *samples; /* owned */
    size_t sample_count, sample_room;
};

struct tly_timeline {
    struct tly_process *processes; /* owned */
    size_t count;
    struct tly_name {
        uint64_t key;
        char *name; /* owned */
    } * names;      /* owned */
    size_t name_count, name_room;
    bool names_sorted;
};

void tly_timeline_finish(struct tly_timeline *t);
/* One more process, all zero; NULL: out of memory.  Earlier pointers are void. */
struct tly_process *tly_timeline_add(struct tly_timeline *t);
/* Forget process i; those behind it move up. */
void tly_timeline_leave_out(struct tly_timeline *t, size_t i);
int tly_timeline_slice(struct tly_process *p, const struct tly_slice *s); /* -ENOMEM */
int tly_timeline_sample(struct tly_process *p, const struct tly_sample *s);
int tly_timeline_name(struct tly_timeline *t, uint64_t key, const char *name);
/* "rank 3 on host", "service 5 (tallyd 1a2b3c4d) on host", without control characters. */
void tly_process_title(const struct tly_process *p, char *out, size_t len);

/* By row, peer, tensor, round, part and time; or by row, peer and time. */
void tly_process_sort(struct tly_process *p, bool by_time);

/* Sorts slices by time.  -EIO as the stream has it. */
int tly_timeline_write(FILE *out, struct tly_timeline *t);
/* Adds the file's processes to *t. -EINVAL, or -ENODATA if it is empty or cut off, and a sentence in `why` (without
 * the file's name), -ENOMEM; *t may then hold some of it. */
int tly_timeline_read(FILE *in, struct tly_timeline *t, char *why, size_t why_len);

/* Are all processes of one job, and each there once?  -EINVAL and a sentence in `why`; *which is the process that it is
 * about. */
int tly_timeline_check(const struct tly_timeline *t, size_t *which, char *why, size_t why_len);

/* Put all processes on the clock of the first one (rank 0, if it is there): see merge.c. *slack: by how much
 * stamps contradict one another, as of clocks that do not run alike; 0 if they do not. -EINVAL and a sentence
 * in `why`; *which is then the process that it is about. */
int tly_timeline_merge(struct tly_timeline *t, int64_t *slack, size_t *which, char *why, size_t why_len);

#endif
