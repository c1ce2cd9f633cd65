/* place.h - where this process stands: rank, job, machine, secret, coordinator's address; read from the
 * launcher's variables and the settings. */
#ifndef TLY_PLACE_H
#define TLY_PLACE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>

#include "base/param.h"
#include "wire/hello.h"

struct tly_place {
    uint32_t rank, size; /* of a tallyd: TLY_NO_RANK, 0 */
    bool together;       /* the launcher says that all ranks are on this machine, */
    bool apart;          /* or that they are not */
    bool in_step;        /* a Slurm step holds the ranks: rank 0 is on its first node */
    int restart;         /* TORCHELASTIC_RESTART_COUNT, or -1 */
    char job[TLY_JOB_BYTES];
    char host[64];    /* for messages */
    char host_id[64]; /* what tells machines apart */
    uint64_t netns;   /* inode of the network name space */
    bool has_secret;
    uint8_t secret[TLY_SECRET_BYTES];
    char coord_host[256]; /* "": none given, and none needed (one rank) */
    char coord_from[64];  /* the setting that gave it, for errors */
    bool coord_given;     /* the user's TALLY_COORD gave it, and not a launcher */
    uint16_t coord_port;
};

/* Where the coordinator may be: all addresses that its name has, IPv4 first. */
enum { TLY_MOST_ADDRESSES = 8 };
struct tly_addresses {
    int count;
    struct sockaddr_storage at[TLY_MOST_ADDRESSES];
    bool named;   /* by a name other than localhost: every machine may see other addresses behind it */
    bool settled; /* it is known to be the right one: not to be looked up again */
};

/* Fill from the settings and the launcher's variables (torchrun's, OpenMPI's, PMI's, Slurm's).  0, or -EINVAL
 * with a sentence that names the variable. */
int tly_place_find(struct tly_place *p, const struct tly_params *params, bool is_rank);

/* Find host, host_id and netns alone: the fields that say which machine this is. */
void tly_place_machine(struct tly_place *p, const struct tly_params *params);

/* Look the coordinator's addresses up; without a secret only loopback ones count.  -EAGAIN (it may help to try
 * again), -EACCES (a secret is needed), -EINVAL (link-local addresses), with a sentence that names the host. */
int tly_place_resolve(const struct tly_place *p, struct tly_addresses *out);

/* True if the coordinator's host is written as loopback: the job is meant for one machine. */
bool tly_place_is_loopback(const struct tly_place *p);

/* Rank 0's own of these addresses moves to the front, alone; *listen: where its coordinator listens.  False: none is. */
bool tly_place_take_own(const struct tly_place *p, struct tly_addresses *to, struct sockaddr_storage *listen);

/* True if the address belongs to this machine. */
bool tly_place_is_own(const struct sockaddr_storage *a);

/* The address that `iface` (TALLY_IFACE: names, CIDRs, ^exclusions) selects: `like` if it may be that, else one of
 * its family if it can.  Loopback and docker0 only if they are named.  -ENODEV, -EINVAL with a sentence. */
int tly_place_iface(const char *iface, const struct sockaddr_storage *like, struct sockaddr_storage *out);

/* "A-B" into first and last port; NULL: 0, 0.  -EINVAL with a sentence. */
int tly_place_ports(const char *range, uint16_t *first, uint16_t *last);

/* The first host of a Slurm node list such as "a[03-05,7],b1" or "rack[1-2]n[01-16]".  -EINVAL. */
int tly_place_first_host(const char *nodelist, char *out, size_t len);

#endif
