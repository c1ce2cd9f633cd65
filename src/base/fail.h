/* fail.h - named moments at which a test can have a process die or pause: what a process does with a frame.  In what is
 * installed there are none; programs of test/fault/ are built with TLY_FAIL_POINTS, and have test/fault/fail.c. */
#ifndef TLY_FAIL_H
#define TLY_FAIL_H

#include <stdint.h>

#ifdef TLY_FAIL_POINTS
/* A process in this role (enum tly_role) "sends", "has sent", "begins", "gets" or "has done" a frame of this type. */
void tly_fail_at(uint32_t role, const char *does, uint32_t type);
#else
static inline void tly_fail_at(uint32_t role, const char *does, uint32_t type)
{
}
#endif

#endif
