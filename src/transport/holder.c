/* holder.c - which process listens at an address: for the sentence of one that wanted it.
 *
 * /proc/net/tcp and tcp6 give the socket's inode and its user; the process is the one with a descriptor of that inode.
 * Other users' descriptors cannot be read, and then the user is all there is to say.  A process that has mapped no file of
 * Tally's runs nothing of Tally. */
#include <ctype.h>
#include <dirent.h>
#include <dlfcn.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/text.h"
#include "transport/address.h"

enum { LISTENS = 10 }; /* TCP_LISTEN in /proc/net/tcp */

/* Whether a table's hexadecimal address is `at`'s, or one that stands for all addresses of a machine. */
static bool holder_is_at(const char *hex, const struct sockaddr_storage *at)
{
    struct sockaddr_storage a = {.ss_family = strlen(hex) > 8 ? AF_INET6 : AF_INET};
    uint32_t words[4] = {0}; /* each as it lies in memory */
    for (int i = 0; i < 4 && strlen(hex) >= 8; i++, hex += 8)
        sscanf(hex, "%8" SCNx32, &words[i]);
    if (a.ss_family == AF_INET6)
        memcpy(&((struct sockaddr_in6 *)&a)->sin6_addr, words, sizeof words);
    else
        memcpy(&((struct sockaddr_in *)&a)->sin_addr, words, sizeof words[0]);
    if (tly_address_is_any(&a) || tly_address_is_any(at))
        return true;
    tly_address_unmap(&a);
    return tly_address_same_host(&a, at);
}

static bool holder_find_socket(const char *table, const struct sockaddr_storage *wanted, unsigned *uid,
                               unsigned long *inode)
{
    char line[512], host[33];
    bool found = false;
    FILE *f = fopen(table, "re");
    while (f && !found && fgets(line, sizeof line, f)) {
        unsigned port, state;
        found = sscanf(line, " %*d: %32[0-9A-Fa-f]:%x %*[0-9A-Fa-f]:%*x %x %*x:%*x %*x:%*x %*x %u %*d %lu",
                       host, &port, &state, uid, inode) == 5 &&
                port == tly_address_port(wanted) && state == LISTENS && holder_is_at(host, wanted);
    }
    if (f)
        fclose(f);
    return found;
}

static bool holder_has_descriptor(const char *pid, const char *wanted)
{
    char path[300], target[64];
    bool found = false;
    snprintf(path, sizeof path, "/proc/%s/fd", pid);
    DIR *d = opendir(path);
    for (struct dirent *e; d && !found && (e = readdir(d));) {
        ssize_t n = readlinkat(dirfd(d), e->d_name, target, sizeof target - 1);
        target[n > 0 ? n : 0] = '\0';
        found = strcmp(target, wanted) == 0;
    }
    if (d)
        closedir(d);
    return found;
}

static bool holder_find_process(unsigned long inode, char *pid, size_t len)
{
    char wanted[64];
    bool found = false;
    snprintf(wanted, sizeof wanted, "socket:[%lu]", inode);
    DIR *d = opendir("/proc");
    for (struct dirent *e; d && !found && (e = readdir(d));) {
        found = isdigit((unsigned char)e->d_name[0]) && holder_has_descriptor(e->d_name, wanted);
        snprintf(pid, len, "%s", e->d_name);
    }
    if (d)
        closedir(d);
    return found;
}

/* The beginning of a file of zero-terminated texts; returns its length. */
static size_t holder_read_texts(const char *pid, const char *name, char *out, size_t len)
{
    char path[300];
    snprintf(path, sizeof path, "/proc/%s/%s", pid, name);
    FILE *f = fopen(path, "re");
    size_t n = f ? fread(out, 1, len - 1, f) : 0;
    if (f)
        fclose(f);
    out[n] = '\0';
    return n;
}

/* The job that the process belongs to, by its launcher's variables.  If none names a job, out stays empty, as it came. */
static void holder_find_job(const char *pid, char *out, size_t len)
{
    static const char *const names[] = {"TALLY_JOB=", "TORCHELASTIC_RUN_ID=", "SLURM_JOB_ID="};
    enum { ROOM = 64 << 10 };
    char *all = malloc(ROOM);
    size_t n = all ? holder_read_texts(pid, "environ", all, ROOM) : 0;
    for (size_t i = 0; i < sizeof names / sizeof *names && !*out; i++)
        for (size_t at = 0; at < n && !*out; at += strlen(all + at) + 1)
            if (strncmp(all + at, names[i], strlen(names[i])) == 0)
                snprintf(out, len, "%s", all + at + strlen(names[i]));
    if (all)
        explicit_bzero(all, ROOM); /* a secret may be among them */
    free(all);
}

/* False if the process is no coordinator for us: it runs nothing of Tally, or is this one. */
static bool holder_may_coordinate(const char *pid)
{
    char path[300], line[600];
    Dl_info own;
    bool readable = false, ours = false;
    const char *self = dladdr((const void *)&holder_may_coordinate, &own) && own.dli_fname
                           ? strrchr(own.dli_fname, '/')
                           : NULL;
    if (atol(pid) == getpid())
        return false;
    snprintf(path, sizeof path, "/proc/%s/maps", pid);
    FILE *f = fopen(path, "re");
    while (f && !ours && fgets(line, sizeof line, f)) {
        readable = true;
        ours = strstr(line, "/libtally") || strstr(line, "/tallyd") || (self && strstr(line, self));
    }
    if (f)
        fclose(f);
    return ours || !readable;
}

bool tly_address_holder(const struct sockaddr_storage *at, char out[TLY_HOLDER])
{
    unsigned uid;
    unsigned long inode;
    char pid[300], command[100], job[64] = "", room[1024], user[64];
    struct passwd entry, *known = NULL;
    out[0] = '\0';
    if (!tly_address_port(at) || (!holder_find_socket("/proc/net/tcp", at, &uid, &inode) &&
                                  !holder_find_socket("/proc/net/tcp6", at, &uid, &inode)))
        return true;
    if (getpwuid_r(uid, &entry, room, sizeof room, &known) == 0 && known)
        snprintf(user, sizeof user, "%s", known->pw_name);
    else
        snprintf(user, sizeof user, "user %u", uid);
    if (!holder_find_process(inode, pid, sizeof pid)) {
        snprintf(out, TLY_HOLDER, ", held by a process of %.40s", user);
        return true;
    }
    size_t n = holder_read_texts(pid, "cmdline", command, sizeof command);
    for (size_t i = 0; i < n; i++)
        if (!command[i])
            command[i] = ' '; /* between arguments */
    tly_text_clean(command);
    holder_find_job(pid, job, sizeof job);
    tly_text_clean(job);
    snprintf(out, TLY_HOLDER, ", held by process %.20s of %.40s%s%.40s: %.100s", pid, user,
             *job ? ", job " : "", job, command);
    return holder_may_coordinate(pid);
}
