/* machine.h - a machine as the bytes of its GPUs see it: sockets, PCIe switches, GPUs, network cards, and what the links
 * between them carry.
 *
 * A plain struct.  This folder fills it in, from the live machine (detect.c) or from files: hwloc's XML (read.c) and a list
 * of what that cannot say (links.c).  src/inside plans with it and includes nothing else of this folder.
 *
 *   detect.c   this machine: hwloc's export, sysfs, and nvml.c for NVLinks and slices
 *   read.c     hwloc's XML (xml.c) → the tree of what is shared
 *   links.c    a list: NVLinks, rates, slices
 *   machine.c  what is still missing: slices, guesses, notes
 *   load.c     all of these in a row; and some of a machine's GPUs
 *
 * The PCIe tree holds only what is shared.  A switch is a place where the ways of at least two devices to the processor
 * meet; a device without one has a way of its own to its NUMA node.  Each link is the narrowest of those in a row. */
#ifndef TLY_MACHINE_H
#define TLY_MACHINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    TLY_MAX_GPUS = 64, /* or MIG slices: what a rank computes on */
    TLY_MAX_SWITCHES = 128,
    TLY_MAX_CARDS = 64,
    TLY_MAX_NODES = 32,
    TLY_MAX_NOTES = 24,
    TLY_NOTE_BYTES = 240,
};

/* How a figure came to be known. */
enum tly_source { TLY_UNKNOWN, TLY_GUESSED, TLY_FOUND, TLY_GIVEN };

/* Bytes/s in each direction; 0: not known. */
struct tly_rate {
    double bytes;
    enum tly_source source;
};

struct tly_node {
    int number; /* the operating system's */
    int cores;
    uint64_t memory;           /* bytes */
    struct tly_rate bandwidth; /* of the memory, reads and writes together */
};

struct tly_switch {
    char address[24];   /* its PCI address; of a GPU that is cut into slices, the GPU's */
    int parent, node;   /* the switch above, -1: none; the NUMA node that it hangs on */
    bool gpu;           /* no switch, but a GPU cut into slices */
    struct tly_rate up; /* the link towards the processor */
};

struct tly_gpu {
    char address[24], name[48];
    int parent, node;         /* as above */
    int slices;               /* that it is to be cut into by tly_machine_finish(); 0: none */
    int slice;                /* of the GPU that is the parent; -1: a whole GPU */
    uint64_t memory;          /* bytes; 0: not known */
    struct tly_rate link;     /* PCIe; of a slice nothing of its own, and 0 */
    struct tly_rate nvswitch; /* into the NVSwitches, and out of them; 0: none */
    uint64_t
        peers; /* a bit for each GPU that this one can copy to over PCIe, without the processor's memory */
};

struct tly_card {
    char address[24], name[32], rdma[32]; /* interface, RDMA device; "" for none */
    int parent, node, ports;
    bool idle;                  /* too slow beside another card to be the one that gradients take */
    struct tly_rate link, rate; /* PCIe; the network, of its fastest port */
};

struct tly_machine {
    int nodes, switches, gpus, cards;
    int nvswitches; /* seen on the PCI bus */
    bool peers_off; /* GPUs do not copy to one another over PCIe */
    struct tly_node node[TLY_MAX_NODES];
    struct tly_switch sw[TLY_MAX_SWITCHES];
    struct tly_gpu gpu[TLY_MAX_GPUS];
    struct tly_card card[TLY_MAX_CARDS];
    double nvlink[TLY_MAX_GPUS]
                 [TLY_MAX_GPUS]; /* bytes/s from one GPU to another over all links between them; 0: none */
    enum tly_source nvlink_source;
    struct tly_rate socket; /* between two NUMA nodes */
    struct tly_rate across; /* a copy from GPU to GPU that leaves their switch */
    int notes;              /* sentences on what is guessed or could not be read */
    char note[TLY_MAX_NOTES][TLY_NOTE_BYTES];
};

/* --- filling it in: the functions of this folder ---------------------------------------------------------
 *
 * tly_machine_read(), or tly_machine_detect(), then perhaps tly_machine_links(), then tly_machine_finish(). */

/* PCIe carries of its nominal rate what BytePS measured, 105 of 126 Gbit/s; a copy that leaves the switch 80. */
#define TLY_PCIE_SHARE 0.833
#define TLY_ACROSS_SHARE (80.0 / 105.0)

/* What the link of the device at this address could carry at most, bytes/s; 0: not known.  hwloc sees what it carries now,
 * and a GPU that has nothing to do slows its link down. */
typedef double tly_link_look(const char *address);

/* hwloc's XML (version 2).  `look` may be NULL.  0, or -EINVAL, -E2BIG, -ENOMEM with a sentence in `why`. */
int tly_machine_read(const char *xml, size_t length, tly_link_look *look, struct tly_machine *m, char *why,
                     size_t size);

/* What XML cannot say, in lines; docs/gpu.md has the grammar.  Lines are counted in the sentence. */
int tly_machine_links(const char *text, size_t length, struct tly_machine *m, char *why, size_t size);

/* Adds what NVIDIA's management library says: names, slices, NVLinks, GPUs that are not visible on the bus.  It is opened
 * by this name, libnvidia-ml.so.1, and need not be there; what it cannot say is a note. */
void tly_machine_nvml(struct tly_machine *m, const char *library);

/* This machine, by hwloc, sysfs and NVML.  -EIO if hwloc fails; whatever else is missing is a note. */
int tly_machine_detect(struct tly_machine *m, char *why, size_t size);

/* Cuts GPUs into their slices, fills in what is not known by guesses that are marked, and notes them.  -E2BIG if there are
 * more than TLY_MAX_GPUS then. */
int tly_machine_finish(struct tly_machine *m, char *why, size_t size);

/* All of it: the machine of this hwloc XML (NULL: this one), with the facts of this links file (NULL: none).  "-" is standard
 * input.  -errno with a sentence that names the file. */
int tly_machine_load(const char *xml, const char *links, struct tly_machine *m, char *why, size_t size);

/* The machine with these of its GPUs alone, in this order. */
void tly_machine_pick(const struct tly_machine *m, const uint8_t gpu[], int count, struct tly_machine *out);

/* Adds a sentence to the notes; further ones than there is room for are dropped. */
void tly_machine_note(struct tly_machine *m, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The GPU, card or switch of this name: gpu3, 0000:3b:00.0, eth0.  -1: none. */
int tly_machine_gpu(const struct tly_machine *m, const char *name);
int tly_machine_card(const struct tly_machine *m, const char *name);

#endif
