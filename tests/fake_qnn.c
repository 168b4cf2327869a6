/* A library with QNN's public interface and nothing behind it, for tests of the probe: one graph, one profile.
 * VERSION is its core version's minor number. */
#include <stdint.h>
#include <stddef.h>

static int backend, graph, profile;
static uint64_t ok(void) { return 0; }
static uint64_t context_create(void *b, void *device, void *config, void **out) { *out = &backend; return 0; }
static uint64_t graph_create(void *context, const char *name, void *config, void **out) { *out = &graph; return 0; }
static uint64_t profile_create(void *b, uint32_t level, void **out) { *out = &profile; return 0; }
static const uint64_t ids[] = {2006, 2019};
static uint64_t get_events(void *p, const uint64_t **out, uint32_t *count) { *out = ids; *count = 2; return 0; }
static uint64_t get_sub_events(uint64_t id, const uint64_t **out, uint32_t *count) { *count = 0; return 0; }
struct event { uint32_t type, unit; uint64_t value; const char *name; };
static uint64_t get_event(uint64_t id, struct event *event) {
  event->type = id, event->value = id * 10;
  return 0;
}
/* Twice the first input, as bytes; at 112 of a tensor's 144 bytes stand its data's address and size. */
static uint64_t execute(void *g, char *in, uint32_t ins, char *out, uint32_t outs, void *profile, void *signal) {
  const uint8_t *from = *(uint8_t **)(in + 104);
  uint8_t *to = *(uint8_t **)(out + 104);
  for (uint32_t i = 0; i < *(uint32_t *)(out + 112); i++) to[i] = 2 * from[i];
  return 0;
}

uint64_t QnnInterface_getProviders(const uint64_t ***out, uint32_t *count) {
  static uint64_t table[100];
  static const uint64_t *providers[1] = {table};
  static const struct { int position; void *function; } functions[] = {
      {9, context_create}, {15, graph_create}, {19, ok}, {21, execute}, {24, ok},
      {28, profile_create}, {30, get_events}, {31, get_sub_events}, {32, get_event}};
  ((uint32_t *)table)[4] = 2, ((uint32_t *)table)[5] = VERSION;
  for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
    table[5 + functions[i].position] = (uint64_t)functions[i].function;
  *out = providers, *count = 1;
  return 0;
}
