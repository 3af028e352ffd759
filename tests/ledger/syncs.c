/* Preloaded into a process that writes a ledger: notes each write to, and sync of, a write-ahead log, and each
 * acknowledgement (a write to file descriptor ACK_FD), in the order in which they happen. Can make one of them fail.
 *
 *   SYNCS_LOG        file that gets one character an event: w write, s sync, a acknowledgement
 *   SYNCS_FAIL_SYNC  number of the sync, from 1, that fails with EIO
 *   SYNCS_SHORT      number of the write, from 1, that writes half; those after it fail with ENOSPC, ten in all
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

#define ACK_FD 9

static int log_fd = -1;
static long syncs, writes;

static long setting(const char *name) {
    const char *value = getenv(name);
    return value ? atol(value) : 0;
}

static void note(char event) {
    if (log_fd < 0) {
        const char *path = getenv("SYNCS_LOG");
        if (!path) return;
        log_fd = open(path, O_WRONLY | O_CREAT | O_APPEND, 0600);
    }
    static ssize_t (*real)(int, const void *, size_t);
    if (!real) real = dlsym(RTLD_NEXT, "write");
    real(log_fd, &event, 1);
}

static int is_log(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 4) return 0;
    return !memcmp(path + size - 4, "-wal", 4);
}

static size_t allowed(size_t size) {
    long at = setting("SYNCS_SHORT");
    writes++;
    if (!at || writes < at || writes > at + 10) return size;
    if (writes == at) return size / 2;
    return 0;
}

#define PWRITE(name)                                                                  \
    ssize_t name(int fd, const void *data, size_t size, off_t at) {                   \
        static ssize_t (*real)(int, const void *, size_t, off_t);                     \
        if (!real) real = dlsym(RTLD_NEXT, #name);                                    \
        if (is_log(fd)) {                                                             \
            note('w');                                                                \
            size_t room = allowed(size);                                              \
            if (!room) { errno = ENOSPC; return -1; }                                 \
            return real(fd, data, room, at);                                          \
        }                                                                             \
        return real(fd, data, size, at);                                              \
    }
PWRITE(pwrite)
PWRITE(pwrite64)

#define SYNC(name)                                                                    \
    int name(int fd) {                                                                \
        static int (*real)(int);                                                      \
        if (!real) real = dlsym(RTLD_NEXT, #name);                                    \
        if (is_log(fd)) {                                                             \
            if (++syncs == setting("SYNCS_FAIL_SYNC")) { errno = EIO; return -1; }    \
            note('s');                                                                \
        }                                                                             \
        return real(fd);                                                              \
    }
SYNC(fsync)
SYNC(fdatasync)

ssize_t write(int fd, const void *data, size_t size) {
    static ssize_t (*real)(int, const void *, size_t);
    if (!real) real = dlsym(RTLD_NEXT, "write");
    if (fd == ACK_FD) note('a');
    return real(fd, data, size);
}
