/* facts_read.c - how a service stands, read by `tally status` alone (facts.c). */
#include <errno.h>

#include "sum/service.h"

int tly_service_facts_read(struct tly_reader *r, struct tly_service_facts *out)
{
    struct tly_service_facts f;
    f.bytes_summed = tly_read64(r);
    f.parts_summed = tly_read64(r);
    f.rounds_open = tly_read64(r);
    f.bytes_in_use = tly_read64(r);
    f.bytes_peak = tly_read64(r);
    f.memory_limit = tly_read64(r);
    f.slots_dropped = tly_read64(r);
    f.bytes_received = tly_read64(r);
    f.bytes_sent = tly_read64(r);
    f.waiting_ms = tly_read64(r);
    f.cpu_us = tly_read64(r);
    tly_read_text(r, f.waits_for, sizeof f.waits_for);
    if (r->failed)
        return -EPROTO;
    *out = f;
    return 0;
}
