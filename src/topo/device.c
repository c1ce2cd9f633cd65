/* device.c - what devices on the PCI bus and RDMA devices carry, from sysfs; for the description of a machine. */
#include <dirent.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "topo/card.h"

enum { PATH_BYTES = 512 };

uint64_t tly_card_rdma_rate_of(const char *folder, const char *device)
{
    char path[PATH_BYTES];
    uint64_t best = 0;
    snprintf(path, sizeof path, "%s/%s/ports", folder, device);
    DIR *ports = opendir(path);
    if (!ports)
        return 0;
    for (const struct dirent *e; (e = readdir(ports));) {
        double gbits = 0; /* "100 Gb/sec (4X EDR)" */
        snprintf(path, sizeof path, "%s/%s/ports/%s/rate", folder, device, e->d_name);
        FILE *f = e->d_name[0] == '.' ? NULL : fopen(path, "re");
        if (f && fscanf(f, "%lf Gb/sec", &gbits) == 1 && gbits > 0 && gbits < 1e5 &&
            (uint64_t)(gbits * 1e9) > best)
            best = (uint64_t)(gbits * 1e9);
        if (f)
            fclose(f);
    }
    closedir(ports);
    return best;
}

/* The fastest of the entries in a folder, each as `rate` has it. */
static uint64_t device_fastest_in(const char *folder, uint64_t (*rate)(const char *folder, const char *name))
{
    uint64_t best = 0;
    DIR *entries = opendir(folder);
    if (!entries)
        return 0;
    for (const struct dirent *e; (e = readdir(entries));) {
        uint64_t found = e->d_name[0] == '.' ? 0 : rate(folder, e->d_name);
        if (found > best)
            best = found;
    }
    closedir(entries);
    return best;
}

uint64_t tly_card_device_rate_of(const char *folder, const char *address)
{
    char path[PATH_BYTES];
    uint64_t best = 0;
    int device = (int)strcspn(address, ".");
    for (int function = 0; function < 8; function++) {
        snprintf(path, sizeof path, "%s/%.*s.%d/net", folder, device, address, function);
        uint64_t net = device_fastest_in(path, tly_card_speed);
        snprintf(path, sizeof path, "%s/%.*s.%d/infiniband", folder, device, address, function);
        uint64_t rdma = device_fastest_in(path, tly_card_rdma_rate_of);
        best = net > best ? net : best;
        best = rdma > best ? rdma : best;
    }
    return best;
}

static double device_number_in(const char *folder, const char *address, const char *name)
{
    char path[PATH_BYTES];
    double number = 0;
    snprintf(path, sizeof path, "%s/%s/%s", folder, address, name);
    FILE *f = fopen(path, "re");
    bool read = f && fscanf(f, "%lf", &number) == 1;
    if (f)
        fclose(f);
    return read && number > 0 && number < 1e4 ? number : 0;
}

double tly_card_bus_rate_of(const char *folder, const char *address)
{
    double speed = device_number_in(folder, address, "max_link_speed"); /* "16.0 GT/s PCIe" a lane */
    double width = device_number_in(folder, address, "max_link_width");
    /* 8 of 10 bits are bytes up to 5 GT/s, 128 of 130 beyond.  Where there is no link the width is 255. */
    return width > 32 ? 0 : speed * 1e9 / 8 * (speed <= 5 ? 0.8 : 128.0 / 130) * width;
}
