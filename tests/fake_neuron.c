/* A library with the interface of MediaTek's NeuronAdapter and nothing behind it: it takes every operator, and the
 * compiled network is four bytes. */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static int object;
#define OK(name) int name() { return 0; }
OK(NeuronModel_free) OK(NeuronModel_finish) OK(NeuronModel_addOperand) OK(NeuronModel_addOperation)
OK(NeuronModel_setName) OK(NeuronModel_setOperandValue) OK(NeuronModel_identifyInputsAndOutputs)
OK(NeuronModel_setOperandSymmPerChannelQuantParams) OK(NeuronModel_setOperandPerChannelQuantParams)
OK(NeuronModel_relaxComputationFloat32toFloat16) OK(NeuronCompilation_free) OK(NeuronCompilation_finish)
OK(NeuronCompilation_setOptimizationString) OK(NeuronCompilation_setPreference) OK(NeuronCompilation_setPriority)
OK(NeuronCompilation_setL1MemorySizeKb) OK(NeuronCompilation_setOptimizationHint)

int Neuron_getVersion(uint8_t *version) { return version[0] = 9, version[1] = 0, version[2] = 3, 0; }
int Neuron_getL1MemorySizeKb(uint32_t *size) { return *size = 1, 0; }
int NeuronModel_create(void **out) { return *out = &object, 0; }
int NeuronCompilation_create(void *model, void **out) { return *out = &object, 0; }
int NeuronCompilation_createWithOptions(void *model, void **out, const char *options) { return *out = &object, 0; }
int NeuronModel_getExtensionOperandType(void *m, const char *e, uint16_t code, int32_t *type) { return *type = 1, 0; }
int NeuronModel_getExtensionOperationType(void *m, const char *e, uint16_t code, int32_t *type) { return *type = 1, 0; }
int NeuronCompilation_getSupportedOperations(void *c, uint32_t n, bool *taken) { return memset(taken, 1, n), 0; }
int NeuronCompilation_getCompiledNetworkSize(void *c, size_t *size) { return *size = 4, 0; }
int NeuronCompilation_storeCompiledNetwork(void *c, void *out, size_t size) { return memcpy(out, "DLA", 4), 0; }
