/* holder.c - which process listens at a port: for the sentence of one that wanted it.
 *
 * /proc/net/tcp and tcp6 give the socket's inode and its user; the process is the one with a descriptor of that inode.
 * Other users' descriptors cannot be read, and then the user is all there is to say. */
#include <ctype.h>
#include <dirent.h>
#include <inttypes.h>
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "transport/address.h"

enum { LISTENS = 10 }; /* TCP_LISTEN in /proc/net/tcp */

static bool find_socket(const char *table, uint16_t port, unsigned *uid, unsigned long *inode)
{
    char line[512];
    bool found = false;
    FILE *f = fopen(table, "re");
    while (f && !found && fgets(line, sizeof line, f)) {
        unsigned at, state;
        found = sscanf(line, " %*d: %*[0-9A-Fa-f]:%x %*[0-9A-Fa-f]:%*x %x %*x:%*x %*x:%*x %*x %u %*d %lu",
                       &at, &state, uid, inode) == 4 &&
                at == port && state == LISTENS;
    }
    if (f)
        fclose(f);
    return found;
}

static bool has_descriptor(const char *pid, const char *wanted)
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

static bool find_process(unsigned long inode, char *pid, size_t len)
{
    char wanted[64];
    bool found = false;
    snprintf(wanted, sizeof wanted, "socket:[%lu]", inode);
    DIR *d = opendir("/proc");
    for (struct dirent *e; d && !found && (e = readdir(d));) {
        found = isdigit((unsigned char)e->d_name[0]) && has_descriptor(e->d_name, wanted);
        snprintf(pid, len, "%s", e->d_name);
    }
    if (d)
        closedir(d);
    return found;
}

/* The beginning of a file of zero-terminated texts; returns its length. */
static size_t read_texts(const char *pid, const char *name, char *out, size_t len)
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
static void find_job(const char *pid, char *out, size_t len)
{
    static const char *const names[] = {"TALLY_JOB=", "TORCHELASTIC_RUN_ID=", "SLURM_JOB_ID="};
    enum { ROOM = 64 << 10 };
    char *all = malloc(ROOM);
    size_t n = all ? read_texts(pid, "environ", all, ROOM) : 0;
    for (size_t i = 0; i < sizeof names / sizeof *names && !*out; i++)
        for (size_t at = 0; at < n && !*out; at += strlen(all + at) + 1)
            if (strncmp(all + at, names[i], strlen(names[i])) == 0)
                snprintf(out, len, "%s", all + at + strlen(names[i]));
    if (all)
        explicit_bzero(all, ROOM); /* a secret may be among them */
    free(all);
}

static void make_printable(char *text, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)text[i] < 32 || text[i] == 127)
            text[i] = ' ';
}

void tly_address_holder(uint16_t port, char out[TLY_HOLDER])
{
    unsigned uid;
    unsigned long inode;
    char pid[300], command[100], job[64] = "", room[1024], user[64];
    struct passwd entry, *known = NULL;
    out[0] = '\0';
    if (!port || (!find_socket("/proc/net/tcp", port, &uid, &inode) &&
                  !find_socket("/proc/net/tcp6", port, &uid, &inode)))
        return;
    if (getpwuid_r(uid, &entry, room, sizeof room, &known) == 0 && known)
        snprintf(user, sizeof user, "%s", known->pw_name);
    else
        snprintf(user, sizeof user, "user %u", uid);
    if (!find_process(inode, pid, sizeof pid)) {
        snprintf(out, TLY_HOLDER, ", held by a process of %.40s", user);
        return;
    }
    size_t n = read_texts(pid, "cmdline", command, sizeof command);
    make_printable(command, n);
    find_job(pid, job, sizeof job);
    make_printable(job, strlen(job));
    snprintf(out, TLY_HOLDER, ", held by process %.20s of %.40s%s%.40s: %.100s", pid, user,
             *job ? ", job " : "", job, command);
}
