// Tables that sort by a click on a head, and switches for all curves of a group of runs.
(() => {
  const keyOf = (row, column) => row.cells[column].dataset.key;

  function compareKeys(a, b) {
    const [x, y] = [Number(a), Number(b)];
    return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b, "en", { numeric: true }) : x - y;
  }

  function sortBy(table, column, backwards) {
    const body = table.tBodies[0];
    const rows = [...body.rows];
    const having = rows.filter((row) => keyOf(row, column) !== undefined);
    const rest = rows.filter((row) => keyOf(row, column) === undefined);
    having.sort((a, b) => compareKeys(keyOf(a, column), keyOf(b, column)) * (backwards ? -1 : 1));
    body.append(...having, ...rest);
    [...table.tHead.rows[0].cells].forEach((cell, number) => {
      if (number !== column) cell.removeAttribute("aria-sort");
      else cell.setAttribute("aria-sort", backwards ? "descending" : "ascending");
    });
  }

  selftask.sortBy = (head, backwards) => sortBy(head.closest("table"), head.cellIndex, backwards);
  document.addEventListener("click", (event) => {
    const head = event.target.closest("table.sortable th");
    if (!head) return;
    const now = head.getAttribute("aria-sort");
    selftask.sortBy(head, now ? now === "ascending" : head.dataset.best === "max");
  });

  function switchGroup(number, shown) {
    for (const group of Object.values(selftask.charts || {})) {
      for (const chart of group.data.charts) {
        for (const curve of chart.curves) {
          if (curve.color !== number) continue;
          const key = `${chart.title}/${curve.label}`;
          shown ? group.hidden.delete(key) : group.hidden.add(key);
        }
      }
      group.draw();
    }
  }

  for (const box of document.querySelectorAll("input[data-group]")) {
    box.addEventListener("change", () => switchGroup(Number(box.dataset.group), box.checked));
  }
})();
