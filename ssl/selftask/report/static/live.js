// Keeps the pages of `selftask watch` up to date; only what is new is asked for.
(() => {
  const EVERY_MS = 2000;
  const state = JSON.parse(document.getElementById("live-state").textContent);
  const told = document.getElementById("live-told");
  let about = state.kind === "run" ? "" : told.textContent;

  async function ask(path, values) {
    const answer = await fetch(`${path}?${new URLSearchParams(values)}`, { cache: "no-store" });
    if (answer.status === 204) return null;
    if (!answer.ok) throw new Error(await answer.text());
    return answer.json();
  }

  // -- the table of all runs

  const marked = new Set();

  function showMarks() {
    const boxes = [...document.querySelectorAll("#runs input")];
    boxes.forEach((box) => (box.checked = marked.has(box.value)));
    const link = document.getElementById("compare");
    const query = new URLSearchParams([...marked].map((name) => ["run", name]));
    link.href = marked.size ? `/compare?${query}` : "/compare";
    link.textContent = marked.size ? `compare ${marked.size} of the runs` : "compare all runs";
  }

  async function updateTable() {
    const news = await ask("/runs.json", { tag: state.tag });
    if (!news) return;
    const table = document.getElementById("runs");
    const head = table.tHead.rows[0];
    const sorted = table.querySelector("th[aria-sort]");
    const [name, order] = sorted ? [sorted.textContent, sorted.getAttribute("aria-sort")] : [];
    head.innerHTML = news.head;
    table.tBodies[0].innerHTML = news.body;
    const again = [...head.cells].find((cell) => cell.textContent === name);
    if (again && order) again.setAttribute("aria-sort", order);
    selftask.sortAgain(table);
    about = news.told;
    state.tag = news.tag;
    showMarks();
  }

  // -- the page of a run

  function append(curve, news) {
    const first = news.x.length ? curve.x.findIndex((step) => step >= news.x[0]) : -1;
    const kept = first < 0 ? curve.x.length : first;
    curve.x = [...curve.x.slice(0, kept), ...news.x];
    curve.y = [...curve.y.slice(0, kept), ...news.y];
  }

  const shown = new Map(); // HTML as it came: what the browser makes of it may differ

  // Replace the content of an element, below its heading; what is unfolded stays so.
  function replace(element, html, heading = "") {
    if (shown.get(element) === html) return;
    const open = [...element.querySelectorAll("details")].map((details) => details.open);
    element.innerHTML = heading + html;
    [...element.querySelectorAll("details")].forEach((details, i) => (details.open ||= Boolean(open[i])));
    shown.set(element, html);
  }

  async function updateRun() {
    const news = await ask("live.json", { step: state.step, shape: state.shape });
    if (news.reload) return location.reload();
    replace(document.getElementById("live-head"), news.head);
    for (const [id, html] of Object.entries(news.sections)) {
      const section = document.getElementById(id);
      const place = section && (section.querySelector(":scope > details") || section);
      if (place) replace(place, html, place.firstElementChild.outerHTML);
      else if (html) return location.reload(); // the first event, the first checkpoint
    }
    const group = (selftask.charts || {}).charts;
    if (!group) return;
    const curves = news.curves.filter((chart) => chart.length);
    const before = JSON.stringify(group.data);
    group.data.charts.forEach((chart, i) => chart.curves.forEach((curve, j) => append(curve, curves[i][j])));
    group.data.clocks = news.clocks;
    group.data.marks = news.marks;
    state.step = news.step;
    if (JSON.stringify(group.data) !== before && !pointerIsDown) group.setData(group.data);
  }

  let pointerIsDown = false; // not redrawn below a zoom that is being drawn
  addEventListener("pointerdown", () => (pointerIsDown = true));
  addEventListener("pointerup", () => (pointerIsDown = false));

  const update = state.kind === "run" ? updateRun : updateTable;
  async function keepUp() {
    if (!document.hidden) {
      try {
        await update();
        told.textContent = `${about}${about ? " · " : ""}live, updated ${new Date().toLocaleTimeString()}`;
        told.classList.remove("warning");
      } catch (error) {
        told.textContent = "no answer from selftask watch: these are the last values it gave";
        told.classList.add("warning");
      }
    }
    setTimeout(keepUp, EVERY_MS);
  }
  addEventListener("change", (event) => {
    if (!event.target.matches("#runs input")) return;
    event.target.checked ? marked.add(event.target.value) : marked.delete(event.target.value);
    showMarks();
  });
  setTimeout(keepUp, EVERY_MS);
})();
