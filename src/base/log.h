/* log.h - log lines: level, rank, topic (the folder that speaks), text; one sink for the process.
 *
 *   tally warning rank 1 comm: 'w' has waited 60 s for rank 0
 *
 * Standard error gets the whole line, a sink the level and what follows it. */
#ifndef TLY_LOG_H
#define TLY_LOG_H

#include <stdbool.h>

#include "base/list.h"
#include "tally/tally.h"

/* Lines above this level are dropped.  Names: off, error, warning, info, debug; -EINVAL for another. */
int tly_log_set_level(const char *name);

/* Put this rank into the process's lines.  False: a communicator of this process has put its own there before, which stays
 * until it is released. */
bool tly_log_claim_rank(int rank);
void tly_log_release_rank(void);

void tly_log(enum tally_log_level level, const char *topic, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* A sink that goes before the application's: a communicator's event queue.  A forked child's lines do not go to those of its
 * parent.  Owner: the log's lock. */
struct tly_log_diversion {
    struct tly_list node;
    tally_log_sink *sink;
    void *user;
};

void tly_log_diversion_init(struct tly_log_diversion *d, tally_log_sink *sink, void *user);
/* From now on this sink gets the lines; once it ends, the one that got them before.  Ending one that has not begun does no
 * harm. */
void tly_log_divert(struct tly_log_diversion *d);
void tly_log_end_diversion(struct tly_log_diversion *d);

#define tly_warn(topic, ...) tly_log(TALLY_LOG_WARNING, topic, __VA_ARGS__)
#define tly_info(topic, ...) tly_log(TALLY_LOG_INFO, topic, __VA_ARGS__)
#define tly_debug(topic, ...) tly_log(TALLY_LOG_DEBUG, topic, __VA_ARGS__)

#endif
