/* process.h - has another rank's process died, or only its main thread? */
#ifndef TLY_LOCAL_PROCESS_H
#define TLY_LOCAL_PROCESS_H

#include <stdbool.h>

enum tly_life { TLY_DIES, TLY_MAY_LIVE, TLY_LIVES };

/* What a thread's line in /proc/PID/task/TID/stat says of it. */
enum tly_life tly_process_life(const char *stat);

/* It has died or is about to, as far as can be seen now. */
bool tly_process_dies(int pidfd);

/* The kernel says of its memory that there is none (ESRCH).  Waits only where nothing can be seen of its threads. */
bool tly_process_has_died(int pidfd);

#endif
