"""From what is offered to what is read of each holder, without I/O.

Every receive and every load takes the same five steps:

1. open a `Catalog` of what is offered (`catalog.py`, `box_catalog.py`);
2. fit it to a `Destination`: pairs of leaves, and the `RankShare` that they take (`land.py`);
3. plan the reads: of each holder ranges of bytes, and the `Pieces` of memory that they fill;
4. fetch: routes and readers fill the pieces, and compare digests;
5. land: `Landing` writes to the caller's tensors, all at once, or says that they are torn.

| step  | `recv(0)`                  | `recv([0, 1])`              | `load`, `pull`, `recover`  |
|-------|----------------------------|-----------------------------|----------------------------|
| open  | `LiveCatalog` of the offer | `BoxCatalog` of the `Union` | `BoxCatalog` of the record |
| fit   | `fitted`                   | `fitted`                    | `fitted`                   |
| plan  | all of one stream          | `GatherReads`               | `stored_reads`             |
| fetch | routes, to a `ReadTarget`  | the same, for each holder   | `stores/reading`           |
| land  | `Landing`                  | `Landing`                   | `Landing`                  |

The first update of a subscription is a load. A state that one rank sends as it is stays one range
of its stream: the fast case is a case of the plan.
"""
