/* Listens to QNN's HTP library while LiteRT's Qualcomm plugin compiles a model with it; holds no code of either.
 *
 * Built as a library with the real one's name and put first on the search path, it opens the real one
 * (EDGE_OPT_QNN_REAL), hands every call on, and writes what it learns to EDGE_OPT_PROBE_LOG, one line a fact,
 * fields apart by tabs:
 *
 *     interface  known|unknown  CORE (as 2.40.0)  BACKEND
 *     finalized  GRAPH  RC
 *     event      TYPE  VALUE                       what the library's profile says of that graph
 *     running    GRAPH                             the line before the emulator gets it: the last one if it crashes
 *     missing    TENSOR                            an input that nobody gave, or of another size
 *     ran        GRAPH  RC
 *
 * With EDGE_OPT_PROBE_RUN=FILE the first graph also runs in the library's x86 emulator, once for each line of FILE,
 * which may be a pipe. A line names a FOLDER. The bytes of an input are in FOLDER/TENSOR.in, those of an output go to
 * FOLDER/TENSOR.out: names of tensors must be names of files. FOLDER/done is the last file to be made.
 *
 * The positions below are those of QNN's public C interface: the functions of QnnInterface.h in their order, and
 * Qnn_Tensor_t of QnnTypes.h, versions 1 and 2. They are trusted only where the library reports a core version that
 * they were tried with; with any other one, it is handed through untouched. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CORE_MAJOR = 2, FIRST_MINOR = 36, LAST_MINOR = 40 };
enum { HEAD_WORDS = 5, TABLE_WORDS = HEAD_WORDS + 60 }; /* id, name and versions; then the functions */
enum {
  CONTEXT_CREATE = HEAD_WORDS + 9,
  GRAPH_CREATE = HEAD_WORDS + 15,
  GRAPH_FINALIZE = HEAD_WORDS + 19,
  GRAPH_EXECUTE = HEAD_WORDS + 21,
  GRAPH_TENSOR_CREATE = HEAD_WORDS + 24,
  PROFILE_CREATE = HEAD_WORDS + 28,
  PROFILE_GET_EVENTS = HEAD_WORDS + 30,
  PROFILE_GET_SUB_EVENTS = HEAD_WORDS + 31,
  PROFILE_GET_EVENT_DATA = HEAD_WORDS + 32,
};
enum { APP_WRITE = 0, APP_READ = 1, APP_READWRITE = 2 }; /* Qnn_TensorType_t */
enum { MEMORY_RAW = 0, BASIC_PROFILE = 1, MOST_GRAPHS = 64, DEEPEST = 3 };

typedef uint64_t (*Function)();

typedef struct {
  uint32_t version, pad0;
  uint32_t id, pad1;
  const char *name;
  uint32_t type, format, dtype, pad2;
  uint64_t quantization[5];
  uint32_t rank, pad3;
  uint32_t *sizes;
  uint32_t memory, pad4;
  void *data;
  uint32_t bytes, pad5;
  uint64_t since_version_2[3];
} Tensor;
_Static_assert(sizeof(Tensor) == 144, "Qnn_Tensor_t");

typedef struct {
  void *handle;
  char *name;
  Tensor *tensors;
  size_t count;
} Graph;

static uint64_t table[TABLE_WORDS], provider;
static const uint64_t *real;
static void *backend;
static Graph graphs[MOST_GRAPHS];
static int graph_count, served;

#define REAL(position) ((Function)real[position])

static void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void say(const char *format, ...) {
  const char *path = getenv("EDGE_OPT_PROBE_LOG");
  FILE *log = path ? fopen(path, "a") : NULL;
  if (!log) return;
  __builtin_va_list values;
  __builtin_va_start(values, format);
  vfprintf(log, format, values);
  __builtin_va_end(values);
  fclose(log); /* at once: the next call may be the one that crashes */
}

static Graph *graph_of(void *handle) {
  for (int i = graph_count - 1; i >= 0; i--)
    if (graphs[i].handle == handle) return &graphs[i];
  return NULL;
}

static uint64_t on_context_create(void *its_backend, void *device, void *config, void **context) {
  backend = its_backend;
  return REAL(CONTEXT_CREATE)(its_backend, device, config, context);
}

static uint64_t on_graph_create(void *context, const char *name, void *config, void **handle) {
  uint64_t rc = REAL(GRAPH_CREATE)(context, name, config, handle);
  if (rc == 0 && graph_count < MOST_GRAPHS) graphs[graph_count++] = (Graph){*handle, strdup(name), NULL, 0};
  return rc;
}

static uint64_t on_graph_tensor_create(void *handle, Tensor *tensor) {
  uint64_t rc = REAL(GRAPH_TENSOR_CREATE)(handle, tensor); /* gives the tensor its id */
  Graph *graph = graph_of(handle);
  if (rc || !graph || tensor->version < 1 || tensor->version > 2 || tensor->type > APP_READWRITE) return rc;
  graph->tensors = realloc(graph->tensors, (graph->count + 1) * sizeof(Tensor));
  Tensor *kept = &graph->tensors[graph->count++];
  memset(kept, 0, sizeof(Tensor));
  memcpy(kept, tensor, tensor->version == 1 ? offsetof(Tensor, since_version_2) : sizeof(Tensor));
  kept->name = strdup(tensor->name);
  kept->sizes = malloc((tensor->rank + 1) * sizeof(uint32_t));
  memcpy(kept->sizes, tensor->sizes, tensor->rank * sizeof(uint32_t));
  return rc;
}

static size_t bytes_of(const Tensor *tensor) {
  size_t bits = tensor->dtype & 0xff, count = 1; /* Qnn_DataType_t ends in the width, written as decimal digits */
  for (uint32_t axis = 0; axis < tensor->rank; axis++) count *= tensor->sizes[axis];
  return count * (bits == 0x64 ? 8 : bits == 0x32 ? 4 : bits == 0x16 ? 2 : 1);
}

static void say_events(void *profile, uint64_t parent, int depth) {
  const uint64_t *ids = NULL;
  uint32_t count = 0;
  uint64_t rc = depth ? REAL(PROFILE_GET_SUB_EVENTS)(parent, &ids, &count)
                      : REAL(PROFILE_GET_EVENTS)(profile, &ids, &count);
  for (uint32_t i = 0; rc == 0 && i < count; i++) {
    struct {
      uint32_t type, unit;
      uint64_t value;
      const char *name;
    } event = {0};
    if (REAL(PROFILE_GET_EVENT_DATA)(ids[i], &event) == 0)
      say("event\t%u\t%llu\n", event.type, (unsigned long long)event.value);
    if (depth < DEEPEST) say_events(profile, ids[i], depth + 1);
  }
}

static FILE *opened(const char *folder, const char *name, const char *suffix, const char *mode) {
  char *path;
  if (asprintf(&path, "%s/%s%s", folder, name, suffix) < 0) return NULL;
  FILE *file = fopen(path, mode);
  free(path);
  return file;
}

/* Reads into a tensor, or writes from it; the bytes that were moved. */
static size_t transfer(const char *folder, const Tensor *tensor, int write) {
  FILE *file = opened(folder, tensor->name, write ? ".out" : ".in", write ? "wb" : "rb");
  if (!file) return 0;
  size_t moved = write ? fwrite(tensor->data, 1, tensor->bytes, file) : fread(tensor->data, 1, tensor->bytes, file);
  fclose(file);
  return moved;
}

static void run(Graph *graph, const char *folder) {
  Tensor *in = calloc(graph->count + 1, sizeof(Tensor)), *out = calloc(graph->count + 1, sizeof(Tensor));
  uint32_t ins = 0, outs = 0;
  for (size_t i = 0; i < graph->count; i++) {
    Tensor tensor = graph->tensors[i];
    tensor.memory = MEMORY_RAW;
    tensor.bytes = bytes_of(&tensor);
    tensor.data = calloc(1, tensor.bytes + 64);
    if (tensor.type == APP_READ) {
      out[outs++] = tensor;
      continue;
    }
    if (transfer(folder, &tensor, 0) != tensor.bytes) say("missing\t%s\n", tensor.name);
    in[ins++] = tensor;
  }
  say("running\t%s\n", graph->name);
  uint64_t rc = REAL(GRAPH_EXECUTE)(graph->handle, in, ins, out, outs, NULL, NULL);
  say("ran\t%s\t%llu\n", graph->name, (unsigned long long)rc);
  for (uint32_t i = 0; i < outs; i++) {
    if (rc == 0) transfer(folder, &out[i], 1);
    free(out[i].data);
  }
  for (uint32_t i = 0; i < ins; i++) free(in[i].data);
  free(in);
  free(out);
  FILE *done = opened(folder, "done", "", "w");
  if (done) fclose(done);
}

static void serve(Graph *graph, const char *path) {
  char *folder = NULL;
  size_t room = 0;
  FILE *folders = fopen(path, "r");
  while (folders && getline(&folder, &room, folders) > 0) {
    folder[strcspn(folder, "\n")] = 0;
    run(graph, folder);
  }
  if (folders) fclose(folders);
  free(folder);
}

static uint64_t on_graph_finalize(void *handle, void *profile, void *signal) {
  Graph *graph = graph_of(handle);
  const char *folders = getenv("EDGE_OPT_PROBE_RUN");
  if (!graph) return REAL(GRAPH_FINALIZE)(handle, profile, signal);
  void *own = profile;
  if (REAL(PROFILE_CREATE)(backend, BASIC_PROFILE, &own)) own = profile;
  uint64_t rc = REAL(GRAPH_FINALIZE)(handle, own, signal);
  say("finalized\t%s\t%llu\n", graph->name, (unsigned long long)rc);
  if (own != profile) say_events(own, 0, 0);
  if (rc == 0 && folders && !served++) serve(graph, folders);
  return rc;
}

uint64_t QnnInterface_getProviders(const uint64_t ***providers, uint32_t *count) {
  const char *path = getenv("EDGE_OPT_QNN_REAL");
  void *library = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
  Function get = library ? (Function)dlsym(library, "QnnInterface_getProviders") : NULL;
  if (!get) {
    fprintf(stderr, "edge-opt's probe: %s\n", dlerror());
    return 1;
  }
  uint64_t rc = get(providers, count);
  if (rc || *count < 1) return rc;
  real = (*providers)[0];
  const uint32_t *versions = (const uint32_t *)(real + 2);
  int known = *count == 1 && versions[0] == CORE_MAJOR && versions[1] >= FIRST_MINOR && versions[1] <= LAST_MINOR;
  say("interface\t%s\t%u.%u.%u\t%u.%u.%u\n", known ? "known" : "unknown", versions[0], versions[1], versions[2],
      versions[3], versions[4], versions[5]);
  if (!known) return rc;
  memcpy(table, real, sizeof(table));
  table[CONTEXT_CREATE] = (uint64_t)on_context_create;
  table[GRAPH_CREATE] = (uint64_t)on_graph_create;
  table[GRAPH_TENSOR_CREATE] = (uint64_t)on_graph_tensor_create;
  table[GRAPH_FINALIZE] = (uint64_t)on_graph_finalize;
  provider = (uint64_t)table;
  *providers = (const uint64_t **)&provider;
  return rc;
}
