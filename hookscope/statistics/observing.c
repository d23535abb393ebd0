/* `Reducer.reduce`, `Recorder.observe` and `GradientRecorder.observe` for the usual tensor, one that native.c reads, where
 * neither distributions nor sketches are asked for. Any other tensor is left to Python. Why it is compiled: see calls.c.
 */

#include "../hooks/observing.h"
#include "native.h"

/* What `self` holds: first what is alike for all, in the order of `ALIKE` in native.py, then in that of
 * `FusedReducer.parts`, last for `observe` and `observe_gradient` what `Reducer.observer` is given.
 *
 * LATEST is a list of one item, NONE or the tuple (weak reference, version, channel axis, reduction) of the tensor that was
 * reduced last. LAYOUTS is a dict, see `layouts_of`, and ERRORS a list, see `read_memory`. KERNEL is the address of the
 * function of native.c, RESULTS that of its last argument, READ that of a `Read`. */
enum {
    TENSOR, PARAMETER, IS_DENSE, DESCRIBED, LAYOUT, REDUCTION, FROM_BYTES,
    VERSION, IS_NEG, CHANNEL_AXIS, NODES, AXES_BY_PLACE, LAYER, CALL, SLOT, ROLE, OUTPUT, CURRENT_NODE,
    SECOND, LAST, ITS_ATTRIBUTES, DIMS, EMPTY, NONE, TRUE, FALSE, ZERO,
    PYTHON, LATEST, LAYOUTS, ERRORS, THREADS, KERNEL, RESULTS, READ,
    AXES, HABITS, AXIS_BY_SHAPE,
    RECORDER = AXES
};

/* The items of `Reduction`, of `ModuleCall`, and of what DESCRIBED and LAYOUT return, that are used here. */
enum { REDUCTION_ITEMS = 17, MODULE = 1, OPERATION = 4 };
enum { SHAPE, STRIDES, BEYOND_BATCH, BY_AXIS };
enum { ADDRESS, KNOWN, ALL_NONZERO };

/* DLPack's `DLTensor`, and what of it a tensor must have here. */
typedef struct {
    const char *data;
    i32 device, device_number, axis_count;
    unsigned char kind, bits;
    unsigned short lanes;
    const i64 *shape, *strides;
    u64 offset;
} Memory;
enum { ON_CPU = 1, FLOATING = 2, MOST_AXES = 16 };

/* DLPack's `DLPackDLTensorFromPyObjectNoSync`. */
typedef int (*Read)(Object *, Memory *);

typedef i32 (*Kernel)(const float *, const Layout *, const Results *);

static Object *held(Object *object) {
    if (object) py->hold(object);
    return object;
}

/* Return an attribute, or what a method returns, as an integer; -1, with no error, if it is none. */
static i64 integer_of(Object *object) {
    i64 value = object ? py->value(object) : -1;
    if (value == -1) py->clear();
    py->drop(object);
    return value;
}

static Object *attribute(Parts self, Object *object, i64 name) { return py->attribute(object, self[name]); }

static int is_plain(Parts self, Object *tensor) {
    Object *type = py->type(tensor);
    return is(type, self[TENSOR]) || type == self[PARAMETER];
}

/* Read where a plain tensor's values lie; tell whether the kernel can read them there, perhaps with an error.
 *
 * torch takes 0.8 ms to raise where a tensor has no plain memory. After its first error, tensors are checked beforehand.
 */
static int read_memory(Parts self, Object *tensor, Memory *memory) {
    if (py->list_length(self[ERRORS]) && !is(py->call(self[IS_DENSE], &tensor, 1, 0), self[TRUE])) return 0;
    if (((Read)py->value(self[READ]))(tensor, memory)) {
        py->clear();
        py->append(self[ERRORS], self[TRUE]);
        return 0;
    }
    return memory->device == ON_CPU && memory->kind == FLOATING && memory->bits == 32 && memory->lanes == 1 &&
           memory->data && memory->axis_count <= MOST_AXES && is(py->method(self[IS_NEG], &tensor, 1, 0), self[FALSE]);
}

/* Return what is known of tensors of this shape and these strides, the tuple (shape, strides, shape beyond the batch,
 * layouts by channel axis); NULL with an error. */
static Object *layouts_of(Parts self, Object *tensor, const Memory *memory) {
    i64 sizes[2 * MOST_AXES];
    for (i64 at = 0; at < memory->axis_count; at++) {
        sizes[at] = memory->shape[at];
        sizes[memory->axis_count + at] = memory->strides[at];
    }
    Object *key = py->bytes((const char *)sizes, 2 * memory->axis_count * (i64)sizeof(i64));
    Object *layouts = key ? held(py->lookup(self[LAYOUTS], key)) : 0; /* another thread may forget it */
    if (key && !layouts) {
        layouts = py->call(self[DESCRIBED], &tensor, 1, 0);
        if (layouts && py->store(self[LAYOUTS], key, layouts)) py->clear();
    }
    py->drop(key);
    return layouts;
}

/* Return what the kernel needs to know for a channel axis: what LAYOUT returned, or NULL if it cannot read the tensor,
 * perhaps with an error. What is returned is borrowed. */
static Object *layout_of(Parts self, Object *layouts, Object *axis) {
    Object *by_axis = py->item(layouts, BY_AXIS), *layout = py->lookup(by_axis, axis);
    if (!layout) {
        Object *given[] = {py->item(layouts, SHAPE), py->item(layouts, STRIDES), axis, self[THREADS]};
        Object *made = py->call(self[LAYOUT], given, 4, 0);
        if (made && !py->store(by_axis, axis, made)) layout = made;
        py->drop(made);
    }
    return layout == self[NONE] ? 0 : layout;
}

/* Return the reduction that the kernel's results make; NULL with an error. */
static Object *reduction_of(Parts self, Object *layout, i32 outcome, const Layout *sizes, const Results *results) {
    Object *items[REDUCTION_ITEMS], *known = py->item(layout, KNOWN), *nonzero = held(py->item(layout, ALL_NONZERO));
    if (outcome & WITH_ZEROS && nonzero != self[NONE]) {
        Object *bytes = py->bytes((const char *)results->nonzero, 8 * sizes->channels);
        py->drop(nonzero);
        nonzero = bytes ? py->call(self[FROM_BYTES], &bytes, 1, 0) : 0;
        py->drop(bytes);
    }
    i64 at = 0;
    for (; at < 4; at++) items[at] = held(py->item(known, at)); /* shape, dtype, elements, channel axis */
    items[at++] = held(py->item(known, 2));                     /* all are finite */
    for (i64 each = 0; each < FOUND - 1; each++) items[at++] = py->real(results->found[each]);
    items[at++] = held(self[ZERO]); /* NaN */
    items[at++] = py->integer((i64)results->found[FOUND - 1]);
    items[at++] = nonzero;
    while (at < REDUCTION_ITEMS) items[at++] = held(self[NONE]);
    int is_whole = 1;
    for (at = 0; at < REDUCTION_ITEMS; at++) is_whole &= items[at] != 0;
    Object *filled = is_whole ? py->tuple(REDUCTION_ITEMS) : 0;
    for (at = 0; at < REDUCTION_ITEMS; at++) {
        if (filled)
            py->set_item(filled, at, items[at]);
        else
            py->drop(items[at]);
    }
    Object *made = filled ? named(self[REDUCTION], filled) : 0;
    py->drop(filled);
    return acyclic(made);
}

/* Return the reduction of the tensor that came last, if this is it, unmodified. */
static Object *latest(Parts self, Object *tensor, i64 version, Object *axis) {
    Object *entry = py->list_item(self[LATEST], 0);
    if (entry == self[NONE] || py->item(entry, 2) != axis || py->value(py->item(entry, 1)) != version) return 0;
    return is(py->call(py->item(entry, 0), 0, 0, 0), tensor) ? held(py->item(entry, 3)) : 0;
}

static void remember(Parts self, Object *tensor, i64 version, Object *axis, Object *reduction) {
    Object *items[] = {py->reference(tensor, 0), py->integer(version), held(axis), held(reduction)};
    Object *entry = items[0] && items[1] ? py->tuple(4) : 0;
    for (i64 at = 0; at < 4; at++) {
        if (entry)
            py->set_item(entry, at, items[at]);
        else
            py->drop(items[at]);
    }
    if (entry)
        py->set_list_item(self[LATEST], 0, entry);
    else
        py->clear();
}

/* Return the reduction of a plain tensor whose memory has been read; NULL, perhaps with an error, if it is for Python to
 * reduce. */
static Object *reduced(Parts self, Object *tensor, i64 version, const Memory *memory, Object *layouts, Object *axis) {
    Object *reduction = latest(self, tensor, version, axis);
    if (reduction) return reduction;
    Object *layout = layout_of(self, layouts, axis);
    if (!layout) return 0;
    const Layout *sizes = (const Layout *)py->value(py->item(layout, ADDRESS));
    const Results *results = (const Results *)py->value(self[RESULTS]);
    Kernel kernel = (Kernel)py->value(self[KERNEL]);
    if (sizes->channels > results->most_channels) return 0;
    i32 outcome = kernel((const float *)(memory->data + memory->offset), sizes, results);
    if (outcome != RARE) reduction = reduction_of(self, layout, outcome, sizes, results);
    if (reduction) remember(self, tensor, version, axis, reduction);
    return reduction;
}

/* Return a plain tensor's version; -1, with no error, if it has none: inference tensors do not. */
static i64 version_of(Parts self, Object *tensor) {
    return is_plain(self, tensor) ? integer_of(attribute(self, tensor, VERSION)) : -1;
}

/* Read a plain tensor's memory, and return what `layouts_of` does; NULL, perhaps with an error, if Python must reduce it. */
static Object *readable(Parts self, Object *tensor, Memory *memory) {
    return read_memory(self, tensor, memory) ? layouts_of(self, tensor, memory) : 0;
}

/* `Reducer.reduce`: a function of Python's, of the kind METH_FASTCALL. */
EXPORT Object *reduce(Object *parts, Object *const *given, i64 count) {
    Parts self = parts_of(parts);
    Memory memory;
    i64 version = count ? version_of(self, given[0]) : -1;
    Object *layouts = version >= 0 ? readable(self, given[0], &memory) : 0;
    Object *axis = count > 1 ? given[1] : self[NONE];
    Object *reduction = layouts ? reduced(self, given[0], version, &memory, layouts, axis) : 0;
    py->drop(layouts);
    if (reduction) return reduction;
    py->clear();
    return py->call(self[PYTHON], given, count, 0);
}

/* As `_matching` in channel_axis.py; 0 where Python must decide. Drops `count`, which may be NULL. */
static i64 matching_axis(Object *count, const Memory *memory, int is_second) {
    i64 channels = count ? py->value(count) : -1, last = memory->axis_count - 1;
    if (channels < 0) {
        py->clear();
        channels = count && py->length(count) == 1 ? py->value(py->item(count, 0)) : -1;
    }
    py->drop(count);
    if (channels < 0) return 0;
    int second_fits = memory->shape[1] == channels, last_fits = memory->shape[last] == channels;
    return (second_fits != last_fits ? second_fits : is_second) ? 1 : last;
}

/* `AxisReader.channel_axis` where it changes nothing that is remembered: the axis is the one known for this shape, or there
 * is none. Else NULL, perhaps with an error. What is returned is borrowed. */
static Object *known_axis(Parts self, Object *maker, Object *kind, const Memory *memory, Object *layouts) {
    i64 last = memory->axis_count - 1, axis = 0;
    if (last < 1) return self[NONE];
    Object *habit = py->lookup(self[HABITS], kind);
    Object *known = habit ? py->lookup(self[AXIS_BY_SHAPE], py->item(layouts, BEYOND_BATCH)) : 0;
    if (!known) return 0;
    Object *count = py->item(habit, 0), *side = py->item(habit, 1);
    if (count != self[EMPTY]) {
        axis = matching_axis(py->attribute(maker, count), memory, side == self[SECOND]);
    } else if (side == self[EMPTY]) {
        Object *attributes = maker == kind ? 0 : py->attribute(maker, self[ITS_ATTRIBUTES]);
        if (maker == kind || (attributes && !py->lookup(attributes, self[DIMS]))) axis = py->value(known);
        py->drop(attributes);
    } else {
        axis = side == self[LAST] ? last : side == self[SECOND];
    }
    return axis && axis == py->value(known) ? known : 0;
}

/* Return what `AxisReader.channel_axis` does; NULL with an error. */
static Object *channel_axis(Parts self, Object *maker, Object *kind, const Memory *memory, Object *layouts) {
    Object *axis = held(known_axis(self, maker, kind, memory, layouts));
    if (axis) return axis;
    Object *asked[] = {self[AXES], maker, py->item(layouts, SHAPE)};
    py->clear();
    return py->method(self[CHANNEL_AXIS], asked, 3, 0);
}

/* Return the reduction of a plain tensor that a module, or an operation of that name, has returned; NULL, with no error, if
 * it is for Python to reduce. */
static Object *output_reduced(Parts self, Object *maker, Object *kind, Object *tensor, i64 version) {
    Memory memory;
    Object *layouts = readable(self, tensor, &memory);
    Object *axis = layouts ? channel_axis(self, maker, kind, &memory, layouts) : 0;
    Object *reduction = axis ? reduced(self, tensor, version, &memory, layouts, axis) : 0;
    py->drop(axis);
    py->drop(layouts);
    if (!reduction) py->clear();
    return reduction;
}

Object *observe_output(Object *parts, Object *module, Object *output, i64 version) {
    Object *kind = py->type(module);
    Object *reduction = output_reduced(parts_of(parts), module, kind, output, version);
    py->drop(kind);
    return reduction;
}

/* `Recorder.observe`: given the call, the slot and the tensor. */
EXPORT Object *observe(Object *parts, Object *const *given, i64 count) {
    Parts self = parts_of(parts);
    i64 version = count == 3 ? version_of(self, given[2]) : -1;
    Object *reduction = 0;
    if (version >= 0) {
        Object *operation = py->item(given[0], OPERATION);
        if (operation == self[NONE]) {
            reduction = observe_output(parts, py->item(given[0], MODULE), given[2], version);
        } else {
            Object *name = py->item(operation, 0);
            reduction = output_reduced(self, name, name, given[2], version);
        }
    }
    return reduction ? reduction : py->call(self[PYTHON], given, count, 0);
}

/* `GradientRecorder.observe`: given the site and the gradient. */
EXPORT Object *observe_gradient(Object *parts, Object *const *given, i64 count) {
    Parts self = parts_of(parts);
    Memory memory;
    Owned owned;
    owned.count = 0;
    i64 version = count == 2 ? version_of(self, given[1]) : -1;
    Object *layouts = version >= 0 ? own(&owned, readable(self, given[1], &memory)) : 0, *reduction = 0;
    if (layouts && is(attribute(self, given[0], ROLE), self[OUTPUT])) {
        Object *key[] = {own(&owned, attribute(self, given[0], LAYER)), own(&owned, attribute(self, given[0], CALL)),
                         own(&owned, attribute(self, given[0], SLOT)), self[OUTPUT]};
        Object *place = tuple_of(&owned, key, 3), *site = tuple_of(&owned, key, 4);
        Object *axes = own(&owned, attribute(self, self[RECORDER], AXES_BY_PLACE));
        Object *nodes = own(&owned, attribute(self, self[RECORDER], NODES));
        Object *node = own(&owned, py->call(self[CURRENT_NODE], 0, 0, 0));
        if (place && site && axes && nodes && node && !py->store(nodes, site, node)) {
            Object *axis = py->lookup(axes, place);
            reduction = reduced(self, given[1], version, &memory, layouts, axis ? axis : self[NONE]);
        }
    }
    give_back(&owned);
    if (reduction) return reduction;
    py->clear();
    return py->call(self[PYTHON], given, count, 0);
}
