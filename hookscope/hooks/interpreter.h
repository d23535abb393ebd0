/* What of Python's C API is used here. The caller passes the entry points of the interpreter that runs it, so that one
 * library serves every version and build of CPython. */

typedef long long i64;
typedef struct Object Object; /* PyObject */

typedef struct {
    void (*hold)(Object *);                                       /* Py_IncRef */
    void (*drop)(Object *);                                       /* Py_DecRef; NULL is allowed */
    Object *(*type)(Object *);                                    /* PyObject_Type */
    Object *(*attribute)(Object *, Object *);                     /* PyObject_GetAttr */
    Object *(*element)(Object *, Object *);                       /* PyObject_GetItem */
    Object *(*call)(Object *, Object *const *, i64, Object *);    /* PyObject_Vectorcall */
    Object *(*method)(Object *, Object *const *, i64, Object *);  /* PyObject_VectorcallMethod */
    Object *(*tuple)(i64);                                        /* PyTuple_New */
    int (*set_item)(Object *, i64, Object *);                     /* PyTuple_SetItem; takes the reference */
    Object *(*item)(Object *, i64);                               /* PyTuple_GetItem; borrowed */
    i64 (*length)(Object *);                                      /* PyTuple_Size */
    Object *(*list)(i64);                                         /* PyList_New */
    int (*set_list_item)(Object *, i64, Object *);                /* PyList_SetItem; takes the reference */
    int (*append)(Object *, Object *);                            /* PyList_Append */
    Object *(*list_item)(Object *, i64);                          /* PyList_GetItem; borrowed */
    i64 (*list_length)(Object *);                                 /* PyList_Size */
    Object *(*lookup)(Object *, Object *);                        /* PyDict_GetItemWithError; borrowed */
    int (*store)(Object *, Object *, Object *);                   /* PyDict_SetItem */
    i64 (*dict_length)(Object *);                                 /* PyDict_Size */
    Object *(*integer)(i64);                                      /* PyLong_FromLongLong */
    Object *(*identity)(void *);                                  /* PyLong_FromVoidPtr: what id() returns */
    i64 (*value)(Object *);                                       /* PyLong_AsLongLong */
    Object *(*real)(double);                                      /* PyFloat_FromDouble */
    Object *(*bytes)(const char *, i64);                          /* PyBytes_FromStringAndSize */
    Object *(*reference)(Object *, Object *);                     /* PyWeakref_NewRef */
    void (*clear)(void);                                          /* PyErr_Clear */
    void (*take_error)(Object **, Object **, Object **);          /* PyErr_Fetch */
    void (*put_error)(Object *, Object *, Object *);              /* PyErr_Restore */
} Interpreter;

#define EXPORT __attribute__((visibility("default")))
#define HIDDEN __attribute__((visibility("hidden")))

extern HIDDEN const Interpreter *py;
