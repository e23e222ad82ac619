// A list of any length: only the rows that can be seen are elements.

class LongList {
  constructor(id, makeRow) {
    this.box = byId(id);
    this.makeRow = makeRow;
    this.rows = [];
    this.space = h("div", { class: "space" });
    this.waiting = false;
    const later = () => this.drawSoon();
    this.box.addEventListener("scroll", later, { passive: true });
    window.addEventListener("resize", later);
  }

  get height() {
    return window.matchMedia("(max-width: 860px)").matches ? 36 : 28;
  }

  set(rows) {
    this.rows = rows;
    if (!this.space.isConnected) this.box.replaceChildren(this.space);
    this.drawSoon();
  }

  // Have a row in sight.
  reveal(place) {
    const [top, tall] = [place * this.height, this.height];
    if (top < this.box.scrollTop) this.box.scrollTop = top;
    else if (top + tall > this.box.scrollTop + this.box.clientHeight) this.box.scrollTop = top + tall - this.box.clientHeight;
    this.drawSoon();
  }

  drawSoon() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => { this.waiting = false; this.draw(); });
  }

  draw() {
    const tall = this.height;
    this.space.style.height = `${this.rows.length * tall}px`;
    const first = Math.max(0, Math.floor(this.box.scrollTop / tall) - 8);
    const last = Math.min(this.rows.length, Math.ceil((this.box.scrollTop + this.box.clientHeight) / tall) + 8);
    const drawn = document.createDocumentFragment();
    for (let place = first; place < last; place += 1) {
      const row = this.makeRow(this.rows[place]);
      row.style.top = `${place * tall}px`;
      drawn.append(row);
    }
    this.space.replaceChildren(drawn);
  }
}
