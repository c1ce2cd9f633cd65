/* deaf.h - threads whose links read nothing. */
#ifndef DEAF_H
#define DEAF_H

#include <stdbool.h>

/* While it is set, nothing more comes in for the links of this thread. */
extern _Thread_local bool deaf;

#endif
