/* Counts the calls of libc by which a process touches files below one folder, and raises a signal before the nth.

Loaded by LD_PRELOAD; does nothing until `attack_arm`. Counted are what opens, changes, syncs, locks, renames and removes
files and folders: between two of these nothing on the disk changes.
*/
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[PATH_MAX];
static long due;
static int number;
static atomic_long calls;

/* From here on the `at`th call (from 1) that touches `below` raises `signal_number`; none with 0. */
void attack_arm(const char *below, long at, int signal_number) {
    strncpy(folder, below, sizeof folder - 1);
    due = at;
    number = signal_number;
    calls = 0;
}

/* How many calls there were since. */
long attack_calls(void) { return calls; }

static int is_below(const char *path) {
    size_t length = strlen(folder);
    return length && strncmp(path, folder, length) == 0 && (path[length] == '/' || path[length] == 0);
}

static int descriptor_is_below(int descriptor) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return is_below(path);
}

static void count(int touches) {
    if (touches && atomic_fetch_add(&calls, 1) + 1 == due) {
        kill(getpid(), number);
    }
}

static void count_descriptor(int descriptor) {
    if (folder[0]) count(descriptor_is_below(descriptor));
}

static void count_path(int at, const char *path) {
    if (folder[0] && path) count(path[0] == '/' ? is_below(path) : descriptor_is_below(at));
}

#define NEXT(name) \
    static __typeof__(name) *next; \
    if (!next) next = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

#define OPENS(name) \
    int name(const char *path, int flags, ...) { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = va_arg(rest, mode_t); \
        va_end(rest); \
        NEXT(name); \
        count_path(AT_FDCWD, path); \
        return next(path, flags, mode); \
    }
#define OPENS_AT(name) \
    int name(int at, const char *path, int flags, ...) { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = va_arg(rest, mode_t); \
        va_end(rest); \
        NEXT(name); \
        count_path(at, path); \
        return next(at, path, flags, mode); \
    }
#define OF_DESCRIPTOR(type, name, declared, ...) \
    type name declared { \
        NEXT(name); \
        count_descriptor(file); \
        return next(__VA_ARGS__); \
    }
#define OF_PATH(name, declared, at, ...) \
    int name declared { \
        NEXT(name); \
        count_path(at, path); \
        return next(__VA_ARGS__); \
    }

OPENS(open)
OPENS(open64)
OPENS_AT(openat)
OPENS_AT(openat64)
OF_DESCRIPTOR(ssize_t, write, (int file, const void *from, size_t size), file, from, size)
OF_DESCRIPTOR(ssize_t, writev, (int file, const struct iovec *from, int size), file, from, size)
OF_DESCRIPTOR(ssize_t, pwrite, (int file, const void *from, size_t size, off_t to), file, from, size, to)
OF_DESCRIPTOR(ssize_t, pwrite64, (int file, const void *from, size_t size, off64_t to), file, from, size, to)
OF_DESCRIPTOR(int, ftruncate, (int file, off_t size), file, size)
OF_DESCRIPTOR(int, ftruncate64, (int file, off64_t size), file, size)
OF_DESCRIPTOR(int, fsync, (int file), file)
OF_DESCRIPTOR(int, fdatasync, (int file), file)
extern int flock(int file, int what);
OF_DESCRIPTOR(int, flock, (int file, int what), file, what)
OF_PATH(mkdir, (const char *path, mode_t mode), AT_FDCWD, path, mode)
OF_PATH(mkdirat, (int at, const char *path, mode_t mode), at, at, path, mode)
OF_PATH(rmdir, (const char *path), AT_FDCWD, path)
OF_PATH(unlink, (const char *path), AT_FDCWD, path)
OF_PATH(unlinkat, (int at, const char *path, int flags), at, at, path, flags)
OF_PATH(rename, (const char *path, const char *to), AT_FDCWD, path, to)
OF_PATH(renameat, (int at, const char *path, int to_at, const char *to), at, at, path, to_at, to)
