/* Keeps large blocks of memory in files: Linux writes them out where memory is short, as it does with swap.
 *
 * Loaded before other libraries (LD_PRELOAD), it takes the place of malloc and its like, as the manual of glibc allows
 * ("Replacing malloc"). A block of LEAST bytes or more is a file in the folder EDGE_OPT_LARGE_BLOCKS that has no name
 * any more, mapped into memory; it ends with the block. All else, and what finds no room on the disk, is glibc's.
 *
 * A process that is forked off does not have such blocks: both would write to the same file. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { LEAST = 8 << 20, MOST = 4096, PAGE = 4096, LONGEST_PATH = 4096 };

typedef struct {
  void *start;
  size_t size;
} Block;

static Block blocks[MOST];
static int used; /* all blocks are among the first so many */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t count, size_t size);
extern void *__libc_realloc(void *start, size_t size);
extern void *__libc_memalign(size_t alignment, size_t size);
extern void __libc_free(void *start);

static void hold(void) { pthread_mutex_lock(&lock); }

static void release(void) { pthread_mutex_unlock(&lock); }

/* A forked process does not have the blocks; their places stay taken until it frees them, too. */
static void in_child(void) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  for (int place = 0; place < used; place++) {
    if (blocks[place].start) mmap(blocks[place].start, blocks[place].size, PROT_NONE, flags, -1, 0);
  }
  release();
}

/* The lock is held meanwhile: a forked process would wait forever for a thread that it does not have. */
__attribute__((constructor)) static void begin(void) { pthread_atfork(hold, release, in_child); }

/* True if there is room in the table. */
static int keep(void *start, size_t size) {
  int place = 0;
  hold();
  while (place < used && blocks[place].start) place++;
  if (place < MOST) {
    blocks[place] = (Block){start, size};
    if (place == used) used++;
  }
  release();
  return place < MOST;
}

/* The size of a block in a file, which is forgotten on request; 0 for other blocks. */
static size_t size_in_file(void *start, int forget) {
  size_t size = 0;
  if (!start || (uintptr_t)start % PAGE) return 0;
  hold();
  for (int place = 0; place < used; place++) {
    if (blocks[place].start != start) continue;
    size = blocks[place].size;
    if (forget) blocks[place].start = NULL;
    break;
  }
  release();
  return size;
}

/* A new block in a file, of zeros; NULL if it is small, or for want of a file. */
static void *in_file(size_t size) {
  char path[LONGEST_PATH];
  const char *folder = getenv("EDGE_OPT_LARGE_BLOCKS");
  if (size < LEAST || !folder) return NULL;
  int length = snprintf(path, sizeof path, "%s/XXXXXX", folder);
  int file = length < LONGEST_PATH ? mkstemp(path) : -1;
  if (file < 0) return NULL;
  unlink(path);
  void *start = MAP_FAILED;
  /* All of it, now: a disk that is full later would end the process. */
  if (!posix_fallocate(file, 0, size)) {
    start = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  }
  close(file);
  if (start == MAP_FAILED) return NULL;
  if (!madvise(start, size, MADV_DONTFORK) && keep(start, size)) return start;
  munmap(start, size);
  return NULL;
}

void *malloc(size_t size) {
  void *start = in_file(size);
  return start ? start : __libc_malloc(size);
}

void *calloc(size_t count, size_t size) {
  size_t all;
  void *start = __builtin_mul_overflow(count, size, &all) ? NULL : in_file(all);
  return start ? start : __libc_calloc(count, size);
}

void free(void *start) {
  int error = errno; /* which free does not change */
  size_t size = size_in_file(start, 1);
  if (size) {
    munmap(start, size);
  } else {
    __libc_free(start);
  }
  errno = error;
}

size_t malloc_usable_size(void *start) {
  static size_t (*of_glibc)(void *);
  size_t size = size_in_file(start, 0);
  if (size) return size;
  if (!of_glibc) of_glibc = (size_t (*)(void *))dlsym(RTLD_NEXT, "malloc_usable_size");
  return of_glibc(start);
}

void *realloc(void *start, size_t size) {
  if (!start) return malloc(size);
  if (size < LEAST && !size_in_file(start, 0)) return __libc_realloc(start, size);
  size_t before = malloc_usable_size(start);
  void *moved = size ? malloc(size) : NULL;
  if (size && !moved) return NULL;
  if (moved) memcpy(moved, start, before < size ? before : size);
  free(start);
  return moved;
}

void *memalign(size_t alignment, size_t size) {
  void *start = alignment <= PAGE ? in_file(size) : NULL;
  return start ? start : __libc_memalign(alignment, size);
}

void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void **start, size_t alignment, size_t size) {
  if (alignment % sizeof(void *) || alignment & (alignment - 1) || !alignment) return EINVAL;
  void *found = memalign(alignment, size);
  if (!found) return ENOMEM;
  *start = found;
  return 0;
}
