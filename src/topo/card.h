/* card.h - how fast the network card behind an address is.  Knows nothing of the rest. */
#ifndef TLY_CARD_H
#define TLY_CARD_H

#include <stdint.h>
#include <sys/socket.h>

/* What the card that has this address of ours says it carries each way, in bit/s; 0: not known, as of the
 * loopback and of cards that are not real. */
uint64_t tly_card_rate(const struct sockaddr_storage *own);

/* The same of an interface by its name; `folder` is /sys/class/net but in tests. */
uint64_t tly_card_rate_of(const char *folder, const char *interface);

/* What that file says of a card that is a device, in bit/s; 0: nothing. */
uint64_t tly_card_speed(const char *folder, const char *interface);

/* --- devices (device.c), for the command alone ------------------------------------------------------ */

/* What an RDMA device says of its fastest port, in bit/s; `folder` is /sys/class/infiniband. */
uint64_t tly_card_rdma_rate_of(const char *folder, const char *device);

/* What the fastest interface or RDMA port of a card carries, over all functions of the device at this address, in bit/s;
 * 0: not known.  `folder` is /sys/bus/pci/devices. */
uint64_t tly_card_device_rate_of(const char *folder, const char *address);

/* What the PCIe link of the device at this address could carry each way if it ran at its fastest, in bytes/s; 0: not
 * known.  `folder` is /sys/bus/pci/devices. */
double tly_card_bus_rate_of(const char *folder, const char *address);

#endif
