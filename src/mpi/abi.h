/* abi.h - MPItrampoline's ABI, version 2.9: the names that a library must have to be loaded by it, and its types.
 *
 * The lists are the whole of it: constants.c makes a symbol MPIABI_NAME of each constant and of each absent
 * function; world.c, collective.c and message.c have the present ones.  A handle is the address of what describes
 * it (mpi.h), and MPItrampoline hands back the value that it found in the constant.  A name that is in none of the
 * lists ends every process that loads us, before main(): test/jax/test_jax.py compares them with those that jaxlib asks for. */
#ifndef TLY_MPI_ABI_H
#define TLY_MPI_ABI_H

#include <stdint.h>

enum { TLY_MPI_ABI_MAJOR = 2, TLY_MPI_ABI_MINOR = 9, TLY_MPI_ABI_PATCH = 0 };

/* Room that a caller has for strings. */
enum { TLY_MPI_MAX_ERROR_STRING = 1024, TLY_MPI_MAX_VERSION_STRING = 8192, TLY_MPI_MAX_PROCESSOR_NAME = 128 };

/* What a receive has got.  The first words are the library's own: here the bytes. */
struct tly_mpi_status {
    int64_t bytes;
    int64_t spare[2];
    int source, tag, error;
};
_Static_assert(sizeof(struct tly_mpi_status) == 40, "as large as the ABI says");

enum { TLY_MPI_NONE = -1 };

/* clang-format off */
/* X(NAME, value): constants of type int.  Errors are numbered from 1, modes are bits, others as they come. */
#define TLY_MPI_INTEGERS(X) \
    X(ANY_SOURCE, -2) X(ANY_TAG, -1) X(PROC_NULL, -3) X(ROOT, -4) X(CART, 1) X(DIST_GRAPH, 2) \
    X(GRAPH, 3) X(CONGRUENT, 1) X(IDENT, 0) X(SIMILAR, 2) X(UNEQUAL, 3) X(BSEND_OVERHEAD, 128) \
    X(KEYVAL_INVALID, -1) X(UNDEFINED, -32766) X(APPNUM, 1) X(HOST, 2) X(IO, 3) X(LASTUSEDCODE, 4) \
    X(TAG_UB, 5) X(UNIVERSE_SIZE, 6) X(WIN_BASE, 7) X(WIN_CREATE_FLAVOR, 8) X(WIN_DISP_UNIT, 9) \
    X(WIN_MODEL, 10) X(WIN_SIZE, 11) X(WTIME_IS_GLOBAL, 12) X(COMBINER_CONTIGUOUS, 1) \
    X(COMBINER_DARRAY, 2) X(COMBINER_DUP, 3) X(COMBINER_F90_COMPLEX, 4) X(COMBINER_F90_INTEGER, 5) \
    X(COMBINER_F90_REAL, 6) X(COMBINER_HINDEXED, 7) X(COMBINER_HINDEXED_BLOCK, 8) X(COMBINER_HVECTOR, 9) \
    X(COMBINER_INDEXED, 10) X(COMBINER_INDEXED_BLOCK, 11) X(COMBINER_NAMED, 12) X(COMBINER_RESIZED, 13) \
    X(COMBINER_STRUCT, 14) X(COMBINER_SUBARRAY, 15) X(COMBINER_VECTOR, 16) X(COMM_TYPE_SHARED, 1) \
    X(DISTRIBUTE_BLOCK, 1) X(DISTRIBUTE_CYCLIC, 2) X(DISTRIBUTE_DFLT_DARG, -1) X(DISTRIBUTE_NONE, 3) \
    X(ERR_ACCESS, 1) X(ERR_AMODE, 2) X(ERR_ARG, 3) X(ERR_ASSERT, 4) X(ERR_BAD_FILE, 5) X(ERR_BASE, 6) \
    X(ERR_BUFFER, 7) X(ERR_COMM, 8) X(ERR_CONVERSION, 9) X(ERR_COUNT, 10) X(ERR_DIMS, 11) \
    X(ERR_DISP, 12) X(ERR_DUP_DATAREP, 13) X(ERR_FILE, 14) X(ERR_FILE_EXISTS, 15) X(ERR_FILE_IN_USE, 16) \
    X(ERR_GROUP, 17) X(ERR_INFO, 18) X(ERR_INFO_KEY, 19) X(ERR_INFO_NOKEY, 20) X(ERR_INFO_VALUE, 21) \
    X(ERR_INTERN, 22) X(ERR_IN_STATUS, 23) X(ERR_IO, 24) X(ERR_KEYVAL, 25) X(ERR_LASTCODE, 0x3fffffff) \
    X(ERR_LOCKTYPE, 26) X(ERR_NAME, 27) X(ERR_NOT_SAME, 28) X(ERR_NO_MEM, 29) X(ERR_NO_SPACE, 30) \
    X(ERR_NO_SUCH_FILE, 31) X(ERR_OP, 32) X(ERR_OTHER, 33) X(ERR_PENDING, 34) X(ERR_PORT, 35) \
    X(ERR_QUOTA, 36) X(ERR_RANK, 37) X(ERR_READ_ONLY, 38) X(ERR_REQUEST, 39) X(ERR_RMA_ATTACH, 40) \
    X(ERR_RMA_CONFLICT, 41) X(ERR_RMA_FLAVOR, 42) X(ERR_RMA_RANGE, 43) X(ERR_RMA_SHARED, 44) \
    X(ERR_RMA_SYNC, 45) X(ERR_ROOT, 46) X(ERR_SERVICE, 47) X(ERR_SIZE, 48) X(ERR_SPAWN, 49) \
    X(ERR_TAG, 50) X(ERR_TOPOLOGY, 51) X(ERR_TRUNCATE, 52) X(ERR_TYPE, 53) X(ERR_UNKNOWN, 54) \
    X(ERR_UNSUPPORTED_DATAREP, 55) X(ERR_UNSUPPORTED_OPERATION, 56) X(ERR_WIN, 57) X(SUCCESS, 0) \
    X(LOCK_EXCLUSIVE, 1) X(LOCK_SHARED, 2) X(MODE_APPEND, 1) X(MODE_CREATE, 2) \
    X(MODE_DELETE_ON_CLOSE, 4) X(MODE_EXCL, 8) X(MODE_NOCHECK, 16) X(MODE_NOPRECEDE, 32) \
    X(MODE_NOPUT, 64) X(MODE_NOSTORE, 128) X(MODE_NOSUCCEED, 256) X(MODE_RDONLY, 512) X(MODE_RDWR, 1024) \
    X(MODE_SEQUENTIAL, 2048) X(MODE_UNIQUE_OPEN, 4096) X(MODE_WRONLY, 8192) X(ORDER_C, 1) \
    X(ORDER_FORTRAN, 2) X(SEEK_CUR, 1) X(SEEK_END, 2) X(SEEK_SET, 0) X(THREAD_FUNNELED, 1) \
    X(THREAD_MULTIPLE, 3) X(THREAD_SERIALIZED, 2) X(THREAD_SINGLE, 0) X(TYPECLASS_COMPLEX, 1) \
    X(TYPECLASS_INTEGER, 2) X(TYPECLASS_REAL, 3) X(WIN_FLAVOR_ALLOCATE, 1) X(WIN_FLAVOR_CREATE, 2) \
    X(WIN_FLAVOR_DYNAMIC, 3) X(WIN_FLAVOR_SHARED, 4) X(WIN_SEPARATE, 1) X(WIN_UNIFIED, 2)

/* X(NAME, bytes, what the library reduces it as; TLY_MPI_NONE: it is only moved).  Pairs are padded as C pads them. */
#define TLY_MPI_TYPES(X) \
    X(BYTE, 1, TALLY_UINT8) X(CHAR, 1, TLY_MPI_NONE) X(CHARACTER, 1, TLY_MPI_NONE) X(PACKED, 1, TLY_MPI_NONE) \
    X(SIGNED_CHAR, 1, TALLY_INT8) X(INT8_T, 1, TALLY_INT8) X(INTEGER1, 1, TALLY_INT8) \
    X(UNSIGNED_CHAR, 1, TALLY_UINT8) X(UINT8_T, 1, TALLY_UINT8) X(SHORT, 2, TALLY_INT16) \
    X(INT16_T, 2, TALLY_INT16) X(INTEGER2, 2, TALLY_INT16) X(UNSIGNED_SHORT, 2, TALLY_UINT16) \
    X(UINT16_T, 2, TALLY_UINT16) X(INT, 4, TALLY_INT32) X(INT32_T, 4, TALLY_INT32) \
    X(INTEGER, 4, TALLY_INT32) X(INTEGER4, 4, TALLY_INT32) X(UNSIGNED, 4, TALLY_UINT32) \
    X(UINT32_T, 4, TALLY_UINT32) X(LONG, 8, TALLY_INT64) X(LONG_LONG, 8, TALLY_INT64) \
    X(INT64_T, 8, TALLY_INT64) X(INTEGER8, 8, TALLY_INT64) X(AINT, 8, TALLY_INT64) \
    X(COUNT, 8, TALLY_INT64) X(OFFSET, 8, TALLY_INT64) X(UNSIGNED_LONG, 8, TALLY_UINT64) \
    X(UNSIGNED_LONG_LONG, 8, TALLY_UINT64) X(UINT64_T, 8, TALLY_UINT64) X(FLOAT, 4, TALLY_FLOAT32) \
    X(REAL, 4, TALLY_FLOAT32) X(REAL4, 4, TALLY_FLOAT32) X(DOUBLE, 8, TALLY_FLOAT64) \
    X(DOUBLE_PRECISION, 8, TALLY_FLOAT64) X(REAL8, 8, TALLY_FLOAT64) X(C_COMPLEX, 8, TALLY_COMPLEX64) \
    X(C_FLOAT_COMPLEX, 8, TALLY_COMPLEX64) X(CXX_FLOAT_COMPLEX, 8, TALLY_COMPLEX64) \
    X(COMPLEX, 8, TALLY_COMPLEX64) X(COMPLEX8, 8, TALLY_COMPLEX64) \
    X(C_DOUBLE_COMPLEX, 16, TALLY_COMPLEX128) X(CXX_DOUBLE_COMPLEX, 16, TALLY_COMPLEX128) \
    X(DOUBLE_COMPLEX, 16, TALLY_COMPLEX128) X(COMPLEX16, 16, TALLY_COMPLEX128) X(C_BOOL, 1, TALLY_BOOL) \
    X(CXX_BOOL, 1, TALLY_BOOL) X(LOGICAL, 4, TLY_MPI_NONE) X(WCHAR, 4, TLY_MPI_NONE) X(LONG_DOUBLE, 16, TLY_MPI_NONE) \
    X(REAL16, 16, TLY_MPI_NONE) X(C_LONG_DOUBLE_COMPLEX, 32, TLY_MPI_NONE) X(CXX_LONG_DOUBLE_COMPLEX, 32, TLY_MPI_NONE) \
    X(COMPLEX32, 32, TLY_MPI_NONE) X(2INT, 8, TLY_MPI_NONE) X(2INTEGER, 8, TLY_MPI_NONE) X(2REAL, 8, TLY_MPI_NONE) X(FLOAT_INT, 8, TLY_MPI_NONE) \
    X(SHORT_INT, 8, TLY_MPI_NONE) X(2DOUBLE_PRECISION, 16, TLY_MPI_NONE) X(DOUBLE_INT, 16, TLY_MPI_NONE) X(LONG_INT, 16, TLY_MPI_NONE) \
    X(LONG_LONG_INT, 16, TLY_MPI_NONE) X(LONG_DOUBLE_INT, 32, TLY_MPI_NONE)

/* X(NAME, the library's reduction; TLY_MPI_NONE: refused).  The logical ones are of booleans alone. */
#define TLY_MPI_OPS(X) \
    X(SUM, TALLY_SUM) X(PROD, TALLY_PRODUCT) X(MIN, TALLY_MIN) X(MAX, TALLY_MAX) X(BAND, TALLY_BAND) \
    X(BOR, TALLY_BOR) X(BXOR, TALLY_BXOR) X(LAND, TALLY_BAND) X(LOR, TALLY_BOR) X(LXOR, TALLY_BXOR) \
    X(MINLOC, TLY_MPI_NONE) X(MAXLOC, TLY_MPI_NONE) X(REPLACE, TLY_MPI_NONE) X(NO_OP, TLY_MPI_NONE)

/* X(Name): functions that are implemented. */
#define TLY_MPI_PRESENT(X) \
    X(Init) X(Init_thread) X(Initialized) X(Finalize) X(Finalized) X(Query_thread) X(Is_thread_main) \
    X(Abort) X(Wtime) X(Wtick) X(Get_version) X(Get_library_version) X(Get_processor_name) \
    X(Error_string) X(Error_class) X(Comm_rank) X(Comm_size) X(Comm_split) X(Comm_dup) X(Comm_free) \
    X(Comm_set_errhandler) X(Type_size) X(Get_count) X(Barrier) X(Bcast) X(Reduce) X(Allreduce) \
    X(Reduce_scatter) X(Reduce_scatter_block) X(Allgather) X(Gather) X(Scatter) X(Alltoall) X(Send) \
    X(Recv) X(Isend) X(Irecv) X(Sendrecv) X(Wait) X(Waitall) X(Test)

/* X(Name): functions that end the process when they are called, with a sentence. */
#define TLY_MPI_ABSENT(X) \
    X(Bsend) X(Ssend) X(Rsend) X(Buffer_attach) X(Buffer_detach) X(Ibsend) X(Issend) X(Irsend) \
    X(Request_free) X(Waitany) X(Testany) X(Testall) X(Waitsome) X(Testsome) X(Request_get_status) \
    X(Iprobe) X(Probe) X(Improbe) X(Mprobe) X(Mrecv) X(Imrecv) X(Cancel) X(Test_cancelled) X(Send_init) \
    X(Bsend_init) X(Ssend_init) X(Rsend_init) X(Recv_init) X(Start) X(Startall) X(Sendrecv_replace) \
    X(Type_contiguous) X(Type_vector) X(Type_create_hvector) X(Type_indexed) X(Type_create_hindexed) \
    X(Type_create_indexed_block) X(Type_create_hindexed_block) X(Type_create_struct) X(Type_struct) \
    X(Type_create_subarray) X(Type_create_darray) X(Get_address) X(Aint_add) X(Aint_diff) X(Type_size_x) \
    X(Type_get_extent) X(Type_get_extent_x) X(Type_create_resized) X(Type_get_true_extent) \
    X(Type_get_true_extent_x) X(Type_commit) X(Type_free) X(Type_dup) X(Get_elements) X(Get_elements_x) \
    X(Type_get_envelope) X(Type_get_contents) X(Pack) X(Unpack) X(Pack_size) X(Pack_external) \
    X(Unpack_external) X(Pack_external_size) X(Gatherv) X(Scatterv) X(Allgatherv) X(Alltoallv) \
    X(Alltoallw) X(Op_create) X(Op_free) X(Op_commutative) X(Reduce_local) X(Scan) X(Exscan) X(Ibarrier) \
    X(Ibcast) X(Igather) X(Igatherv) X(Iscatter) X(Iscatterv) X(Iallgather) X(Iallgatherv) X(Ialltoall) \
    X(Ialltoallv) X(Ialltoallw) X(Ireduce) X(Iallreduce) X(Ireduce_scatter_block) X(Ireduce_scatter) \
    X(Iscan) X(Iexscan) X(Group_size) X(Group_rank) X(Group_translate_ranks) X(Group_compare) \
    X(Comm_group) X(Group_union) X(Group_intersection) X(Group_difference) X(Group_incl) X(Group_excl) \
    X(Group_range_incl) X(Group_range_excl) X(Group_free) X(Comm_compare) X(Comm_dup_with_info) \
    X(Comm_idup) X(Comm_create) X(Comm_create_group) X(Comm_split_type) X(Comm_set_info) \
    X(Comm_get_info) X(Comm_test_inter) X(Comm_remote_size) X(Comm_remote_group) X(Intercomm_create) \
    X(Intercomm_merge) X(Comm_create_keyval) X(Comm_free_keyval) X(Comm_set_attr) X(Comm_get_attr) \
    X(Comm_delete_attr) X(Win_create_keyval) X(Win_free_keyval) X(Win_set_attr) X(Win_get_attr) \
    X(Win_delete_attr) X(Type_create_keyval) X(Type_free_keyval) X(Type_set_attr) X(Type_get_attr) \
    X(Type_delete_attr) X(Comm_set_name) X(Comm_get_name) X(Type_set_name) X(Type_get_name) \
    X(Win_set_name) X(Win_get_name) X(Cart_create) X(Dims_create) X(Graph_create) \
    X(Dist_graph_create_adjacent) X(Dist_graph_create) X(Topo_test) X(Graphdims_get) X(Graph_get) \
    X(Cartdim_get) X(Cart_get) X(Cart_rank) X(Cart_coords) X(Graph_neighbors_count) X(Graph_neighbors) \
    X(Dist_graph_neighbors_count) X(Dist_graph_neighbors) X(Cart_shift) X(Cart_sub) X(Cart_map) \
    X(Graph_map) X(Neighbor_allgather) X(Neighbor_allgatherv) X(Neighbor_alltoall) X(Neighbor_alltoallv) \
    X(Neighbor_alltoallw) X(Ineighbor_allgather) X(Ineighbor_allgatherv) X(Ineighbor_alltoall) \
    X(Ineighbor_alltoallv) X(Ineighbor_alltoallw) X(Alloc_mem) X(Free_mem) X(Comm_create_errhandler) \
    X(Comm_get_errhandler) X(Win_create_errhandler) X(Win_set_errhandler) X(Win_get_errhandler) \
    X(File_create_errhandler) X(File_set_errhandler) X(File_get_errhandler) X(Errhandler_free) \
    X(Add_error_class) X(Add_error_code) X(Add_error_string) X(Comm_call_errhandler) \
    X(Win_call_errhandler) X(File_call_errhandler) X(Info_create) X(Info_set) X(Info_delete) X(Info_get) \
    X(Info_get_valuelen) X(Info_get_nkeys) X(Info_get_nthkey) X(Info_dup) X(Info_free) X(Comm_spawn) \
    X(Comm_get_parent) X(Comm_spawn_multiple) X(Open_port) X(Close_port) X(Comm_accept) X(Comm_connect) \
    X(Publish_name) X(Unpublish_name) X(Lookup_name) X(Comm_disconnect) X(Comm_join) X(Win_create) \
    X(Win_allocate) X(Win_allocate_shared) X(Win_shared_query) X(Win_create_dynamic) X(Win_attach) \
    X(Win_detach) X(Win_free) X(Win_get_group) X(Win_set_info) X(Win_get_info) X(Put) X(Get) \
    X(Accumulate) X(Get_accumulate) X(Fetch_and_op) X(Compare_and_swap) X(Rput) X(Rget) X(Raccumulate) \
    X(Rget_accumulate) X(Win_fence) X(Win_start) X(Win_complete) X(Win_post) X(Win_wait) X(Win_test) \
    X(Win_lock) X(Win_lock_all) X(Win_unlock) X(Win_unlock_all) X(Win_flush) X(Win_flush_all) \
    X(Win_flush_local) X(Win_flush_local_all) X(Win_sync) X(Grequest_start) X(Grequest_complete) \
    X(Status_set_elements) X(Status_set_elements_x) X(Status_set_cancelled) X(File_open) X(File_close) \
    X(File_delete) X(File_set_size) X(File_preallocate) X(File_get_size) X(File_get_group) \
    X(File_get_amode) X(File_set_info) X(File_get_info) X(File_set_view) X(File_get_view) \
    X(File_read_at) X(File_read_at_all) X(File_write_at) X(File_write_at_all) X(File_iread_at) \
    X(File_iread_at_all) X(File_iwrite_at) X(File_iwrite_at_all) X(File_read) X(File_read_all) \
    X(File_write) X(File_write_all) X(File_iread) X(File_iread_all) X(File_iwrite) X(File_iwrite_all) \
    X(File_seek) X(File_get_position) X(File_get_byte_offset) X(File_read_shared) X(File_write_shared) \
    X(File_iread_shared) X(File_iwrite_shared) X(File_read_ordered) X(File_write_ordered) \
    X(File_seek_shared) X(File_get_position_shared) X(File_read_at_all_begin) X(File_read_at_all_end) \
    X(File_write_at_all_begin) X(File_write_at_all_end) X(File_read_all_begin) X(File_read_all_end) \
    X(File_write_all_begin) X(File_write_all_end) X(File_read_ordered_begin) X(File_read_ordered_end) \
    X(File_write_ordered_begin) X(File_write_ordered_end) X(File_get_type_extent) X(Register_datarep) \
    X(File_set_atomicity) X(File_get_atomicity) X(File_sync) X(Type_create_f90_real) \
    X(Type_create_f90_complex) X(Type_create_f90_integer) X(Type_match_size) X(Comm_f2c) X(Comm_c2f) \
    X(Type_f2c) X(Type_c2f) X(Group_f2c) X(Group_c2f) X(Request_f2c) X(Request_c2f) X(File_f2c) \
    X(File_c2f) X(Win_f2c) X(Win_c2f) X(Op_f2c) X(Op_c2f) X(Info_f2c) X(Info_c2f) X(Errhandler_f2c) \
    X(Errhandler_c2f) X(Message_f2c) X(Message_c2f) X(Status_f2c) X(Status_c2f)

/* X(Name): extensions, MPIXABI_Name. */
#define TLY_MPI_EXTENSIONS(X) X(Query_cuda_support) X(Query_hip_support) X(Query_ze_support)

/* X(NAME): constants of a pointer's size that are NULL: nothing, "ignore it", and callbacks of functions that are
 * absent. */
#define TLY_MPI_NULLS(X) \
    X(ARGV_NULL) X(ARGVS_NULL) X(ERRCODES_IGNORE) X(BOTTOM) X(COMM_NULL) X(COMM_DUP_FN) X(COMM_NULL_COPY_FN) \
    X(COMM_NULL_DELETE_FN) X(DUP_FN) X(NULL_COPY_FN) X(CONVERSION_FN_NULL) X(DATATYPE_NULL) X(NULL_DELETE_FN) \
    X(ERRHANDLER_NULL) X(FILE_NULL) X(F_STATUS_IGNORE) X(F_STATUSES_IGNORE) X(GROUP_NULL) X(INFO_NULL) \
    X(MESSAGE_NULL) X(DISPLACEMENT_CURRENT) X(OP_NULL) X(REQUEST_NULL) X(STATUS_IGNORE) X(STATUSES_IGNORE) \
    X(TYPE_DUP_FN) X(TYPE_NULL_COPY_FN) X(TYPE_NULL_DELETE_FN) X(WIN_NULL) X(WIN_DUP_FN) X(WIN_NULL_COPY_FN) \
    X(WIN_NULL_DELETE_FN)

/* X(NAME): such constants that must differ from NULL and from each other. */
#define TLY_MPI_MARKS(X) \
    X(IN_PLACE) X(UNWEIGHTED) X(WEIGHTS_EMPTY) X(ERRORS_ARE_FATAL) X(ERRORS_RETURN) X(GROUP_EMPTY) X(INFO_ENV) \
    X(MESSAGE_NO_PROC)
/* clang-format on */

/* The integers, for ourselves: TLY_MPI_ERR_COUNT and so on. */
enum {
#define X(name, value) TLY_MPI_##name = (value),
    TLY_MPI_INTEGERS(X)
#undef X
};

#endif
