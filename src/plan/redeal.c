/* redeal.c - parts that stay with a service between operations, when shares change: which of them move, and where to.
 *
 * A service's due is its share of all bytes by the new weights.  One that has more gives up parts, but never so many that it falls
 * below its due.  A service gives up every part if it has no share.  The parts that it gives up are spread evenly over all that it
 * has.  Each goes to the service that lacks most. */
#include "plan/plan.h"

#include <errno.h>
#include <stdlib.h>

enum { ONE = 1 << 16 }; /* unit of the rate at which a service gives up bytes */

struct redeal_service {
    int64_t over;  /* bytes that it has beyond its due */
    uint64_t rate; /* bytes given up of ONE bytes that it has */
    uint64_t owed; /* bytes to give up, in 1/ONE */
};

static void redeal_begin(struct redeal_service *s, int services, const uint32_t *weight,
                         const struct tly_plan_kept *part, uint32_t count)
{
    uint64_t all = 0;
    double weights = 0;
    for (uint32_t i = 0; i < count; i++) {
        s[part[i].owner].over += part[i].length;
        all += part[i].length;
    }
    for (int i = 0; i < services; i++)
        weights += weight[i];
    for (int i = 0; i < services; i++) {
        int64_t has = s[i].over;
        s[i].over -= (int64_t)((double)all * weight[i] / weights);
        if (s[i].over > 0)
            s[i].rate = weight[i] ? (uint64_t)((double)s[i].over / (double)has * ONE) : ONE;
    }
}

static int redeal_neediest(const struct redeal_service *s, int services, const uint32_t *weight)
{
    int best = -1;
    for (int i = 0; i < services; i++)
        if (weight[i] && (best < 0 || s[i].over < s[best].over))
            best = i;
    return best;
}

int tly_plan_redeal(int services, const uint32_t *weight, uint32_t count, struct tly_plan_kept *part)
{
    struct redeal_service *s = calloc((size_t)services + 1, sizeof *s);
    if (!s)
        return -ENOMEM;
    redeal_begin(s, services, weight, part, count);
    for (uint32_t i = 0; i < count; i++) {
        struct redeal_service *from = &s[part[i].owner];
        uint64_t cost = (uint64_t)part[i].length * ONE;
        from->owed += part[i].length * from->rate;
        if (from->owed < cost)
            continue;
        int to = redeal_neediest(s, services, weight);
        if (to < 0)
            break;
        bool must = !weight[part[i].owner];
        if (!must &&
            (from->over < (int64_t)part[i].length || s[to].over + (int64_t)part[i].length > from->over))
            continue;
        from->owed -= cost;
        from->over -= part[i].length;
        s[to].over += part[i].length;
        part[i].owner = (uint16_t)to;
    }
    free(s);
    return 0;
}
