/* root.h - what rules in which one rank gives its data to the others have in common (broadcast/service.c). */
#ifndef TLY_OPS_ROOT_H
#define TLY_OPS_ROOT_H

#include <stdint.h>

#include "ops/rule.h"

uint32_t tly_root_length(const struct tly_frame *f, const struct tly_members *who, uint32_t rank);
uint8_t *tly_root_place(const struct tly_round *r);
void tly_root_advance(struct tly_job *job, struct tly_round *r, uint32_t from, uint32_t to);

#endif
